"""Follows the run's log: detects progress and end, and passes every event to the report."""

from collections.abc import Callable

import structlog

from messages import BatchTrained, Message, RunFailed, RunFinished, TrainerStarted
from runtime.bus.bus import Bus
from runtime.bus.errors import LogTrimmedAway
from runtime.node.node_plan import NodePlan, RunEnd
from runtime.node.reporting import Reporting
from runtime.node.stalls import StallWatch

log = structlog.get_logger()


class Follower:
    """Reads the log for the node daemon.

    Args:
        reporting: receives each event.
        progress: called for each trained step.
        end: called when the run has ended, by the log.
    """

    def __init__(
        self, plan: NodePlan, reporting: Reporting, *, progress: Callable[[], None], end: Callable[[RunEnd], None]
    ) -> None:
        self._plan = plan
        self._reporting = reporting
        self._progress = progress
        self._end = end
        self._steps = 0
        self._last_seq = 0
        self._first_seq = 1

    def begin_at(self, first_seq: int) -> None:
        """Set the log sequence from which events belong to this start: an earlier failure does not end it."""
        self._first_seq = first_seq

    async def follow(self, bus: Bus, watch: StallWatch | None) -> None:
        """Follow until cancelled. Events that are trimmed before they are read are skipped."""
        while True:
            try:
                await self._read_on(bus, watch)
            except LogTrimmedAway as error:
                log.warning("events_not_shown", reason=str(error))

    async def _read_on(self, bus: Bus, watch: StallWatch | None) -> None:
        async with bus.read(from_seq=self._last_seq + 1, buries=True) as events:
            async for received in events:
                self._last_seq = received.seq
                if watch is not None:
                    watch.happened(received.message)
                self._decide(received.message, live=received.seq >= self._first_seq)
                await self._reporting.take(received)

    def _decide(self, event: Message, *, live: bool) -> None:
        match event:
            case BatchTrained(step=step):
                self._advance(step + 1)
            case TrainerStarted(step=step):
                self._advance(step)
            case RunFinished(steps=steps) if live or steps >= self._plan.num_steps:
                self._end(RunEnd(finished=True))  # an earlier start may have finished with a lower num_steps
            case RunFailed(reason=reason) if live:
                self._end(RunEnd(finished=False, error=reason))
            case _:
                pass

    def _advance(self, steps: int) -> None:
        if steps > self._steps:
            self._steps = steps
            self._progress()
