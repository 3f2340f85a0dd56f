"""The run's log on a node: follows its events, and publishes the state changes of the node's processes."""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

import structlog

from messages import ActorExited, ActorStarted, BatchTrained, Message, RunFailed, RunFinished, TrainerStarted
from runtime.bus.addresses import Address
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, LogTrimmedAway
from runtime.node.node_plan import NodePlan, RunEnd
from runtime.node.reporting import Reporting
from runtime.node.stalls import StallWatch
from runtime.node.supervisor.state_changes import Change, Exited, Ready, Started
from runtime.settings.processes import ProcessSpec
from runtime.util.retrying import FOR_EVER, retried

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
                self._decide(received.message, live=received.time.timestamp() >= self._plan.started)
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


async def publish_changes(bus: Bus, node: str, changes: AsyncIterable[Change]) -> None:
    """Publish process changes as events, and server addresses in the KV store."""
    async for change in changes:
        name = change.spec.name
        match change:
            case Started():
                await _insist(
                    bus.publish, ActorStarted(actor=name, node=node, pid=change.pid, restarts=change.restarts)
                )
            case Exited():
                event = ActorExited(
                    actor=name,
                    node=node,
                    pid=change.pid,
                    exit_code=change.exit_code,
                    reason=change.reason,
                    restart_in_s=change.restart_in_s,
                )
                await _insist(bus.publish, event)
            case Ready() if change.spec.address_key is not None:
                address = Address(url=f"http://{change.host}:{change.port}", agent=bus.name, pid=change.pid)
                await _insist(bus.kv.put, change.spec.address_key, address)
            case _:
                pass


async def forget_addresses(bus: Bus, specs: Iterable[ProcessSpec]) -> None:
    """Delete the addresses of an earlier daemon's servers, which no longer run."""
    for spec in specs:
        if spec.address_key is not None:
            await bus.kv.delete(spec.address_key)


async def _insist(action: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Retry an action through any bus outage, until the daemon ends."""
    await retried(lambda: action(*arguments), on=BusError, times=FOR_EVER, failed=_log_failure)


def _log_failure(error: Exception, failures: int) -> None:
    log.warning("publish_failed", error=str(error), in_a_row=failures)
