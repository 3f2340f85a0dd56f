"""Detects a stalled run, and collects what each actor waits for."""

from collections.abc import Iterable
from typing import Final

import anyio
import structlog

from messages import EventLoopBlocked, RunStalled, StatsGiven, StatsRequested, WeightsProgressed
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallError, CallRefused, CallTimeout
from runtime.bus.roster import instances

log = structlog.get_logger()

ANSWER_TIMEOUT_S: Final = 5.0
QUERIES_AT_ONCE: Final = 64
AT_WORK: Final = "at work"
NOT_THERE: Final = "not there"


class StallWatch:
    """Publishes run.stalled when no event is logged for `after_s`, and again each time the stall has doubled.

    Args:
        expected: instances to query even if they are not on the roster, for example while they start or hang.
        answer_timeout_s: maximum seconds to wait for an instance's answer.
    """

    def __init__(
        self, bus: Bus, after_s: float, expected: Iterable[str], *, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._bus = bus
        self._after_s = after_s
        self._expected = tuple(expected)
        self._answer_timeout_s = answer_timeout_s
        self._newest = anyio.current_time()
        self._resumed = anyio.Event()  # set by an event after a reported stall

    def happened(self, event: object) -> None:
        """Record that an event was logged."""
        if not isinstance(event, EventLoopBlocked | RunStalled | WeightsProgressed):
            self._newest = anyio.current_time()
            self._resumed.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        seen, patience_s = self._newest, self._after_s
        while True:
            if self._newest > seen:
                seen, patience_s = self._newest, self._after_s
            left_s = seen + patience_s - anyio.current_time()
            if left_s > 0:
                with anyio.move_on_after(left_s):  # a reported stall may end long before the next report
                    await (self._resumed.wait() if patience_s > self._after_s else anyio.sleep_forever())
                continue
            patience_s *= 2
            self._resumed = anyio.Event()
            try:
                await self._publish(seen)
            except BusError as error:  # no bus, no report
                log.warning("stall_not_published", error=str(error))

    async def _publish(self, since: float) -> None:
        waiting = await self._query_all()
        if self._newest > since:
            return
        idle_s = round(anyio.current_time() - since, 1)
        log.warning("run_stalled", idle_s=idle_s, waiting=waiting)
        await self._bus.publish(RunStalled(idle_s=idle_s, waiting=waiting))

    async def _query_all(self) -> dict[str, str]:
        present = await instances(self._bus)
        limiter = anyio.Semaphore(QUERIES_AT_ONCE)
        answers: dict[str, str] = {}

        async def query(instance: str) -> None:
            async with limiter:
                answers[instance] = await self._query(instance)

        async with anyio.create_task_group() as group:
            for instance in {*present, *self._expected}:
                group.start_soon(query, instance)
        return dict(sorted(answers.items()))

    async def _query(self, instance: str) -> str:
        try:
            given = await self._bus.call(instance, StatsRequested(), StatsGiven, timeout_s=self._answer_timeout_s)
        except CallTimeout:
            return f"no answer in {self._answer_timeout_s:g} s"
        except CallRefused as error:
            return f"failed to answer: {error}"
        except CallError:
            return NOT_THERE
        return given.waits_for or AT_WORK
