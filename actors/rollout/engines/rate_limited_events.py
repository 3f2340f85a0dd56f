"""Rate-limited engine events: an engine that flaps must not flood the run's log."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from messages import EngineRequestsFailed, EngineState, EngineStateChanged, WeightsRefused
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError

log = structlog.get_logger()

BURST: Final = 8  # state changes of one engine that are always published
REFILL_S: Final = 60.0  # seconds until one more may be published
FIRST_REFUSAL_S: Final = 10.0  # until a refusal of the same version is published again; doubles each time
REASON_CHARS: Final = 500
BOUND: Final = 1000  # events waiting to be published


@dataclass
class TokenBucket:
    """Token bucket for the state changes of one engine. Pure."""

    left: float = BURST
    counted_at: float = 0.0
    num_suppressed: int = 0  # suppressed since the last published one

    def take(self, now: float) -> bool:
        """Whether a change may be published at `now`, in seconds of any clock."""
        self.left = min(float(BURST), self.left + (now - self.counted_at) / REFILL_S)
        self.counted_at = now
        if self.left < 1.0:
            self.num_suppressed += 1
            return False
        self.left -= 1.0
        return True


@dataclass
class Refusals:
    """Counts one engine's refusals of a version, with exponential backoff of their events. Pure."""

    version: int
    unusable: bool = False  # the version's files are damaged
    number: int = 0
    due_at: float = -math.inf
    gap_s: float = FIRST_REFUSAL_S

    def take(self, now: float) -> bool:
        """Count one refusal; return whether it is published."""
        self.number += 1
        if now < self.due_at:
            return False
        if now > self.due_at + self.gap_s:  # no refusal for longer than the backoff
            self.gap_s = FIRST_REFUSAL_S
        self.due_at, self.gap_s = now + self.gap_s, 2 * self.gap_s
        return True


class RateLimitedEvents:
    """Publishes rate-limited engine events, in the order in which they occurred."""

    def __init__(self, instance: str = "") -> None:
        self._instance = instance
        self._allowances: dict[str, TokenBucket] = {}
        self._refusals: dict[str, Refusals] = {}
        self._failures: dict[tuple[str, str], Refusals] = {}  # failed requests, by engine and kind of failure
        self._waiting = deque[EngineStateChanged | WeightsRefused | EngineRequestsFailed](
            maxlen=BOUND
        )  # a full queue drops the oldest event
        self._arrived = anyio.Event()

    def changed(self, engine: str, old: EngineState, new: EngineState, reason: str, version: int) -> None:
        """Report an engine's state change."""
        now = anyio.current_time()
        allowance = self._allowances.setdefault(engine, TokenBucket(counted_at=now))
        if not allowance.take(now):
            return
        event = EngineStateChanged(
            instance=self._instance,
            engine=engine,
            old=old,
            new=new,
            reason=clipped(reason, REASON_CHARS),
            version=version,
            num_untold=allowance.num_suppressed,
        )
        allowance.num_suppressed = 0
        self._put(event)

    def refused(self, engine: str, version: int, reason: str, *, unusable: bool = False) -> None:
        """Report that an engine refuses a weight version, or that the version's files are damaged (`unusable`)."""
        refusals = self._refusals.get(engine)
        if refusals is None or (refusals.version, refusals.unusable) != (version, unusable):
            refusals = self._refusals[engine] = Refusals(version, unusable)
        if refusals.take(anyio.current_time()):
            reason = clipped(reason, REASON_CHARS)
            event = WeightsRefused(
                version=version,
                instance=self._instance,
                engine=engine,
                reason=reason,
                num_refusals=refusals.number,
                unusable=unusable,
            )
            self._put(event)

    def failed(self, engine: str, kind: str, reason: str) -> None:
        """Report a failed request to a running engine, rate-limited per kind of failure."""
        failures = self._failures.setdefault((engine, kind), Refusals(0))
        if failures.take(anyio.current_time()):
            reason = clipped(reason, REASON_CHARS)
            self._put(
                EngineRequestsFailed(
                    instance=self._instance, engine=engine, reason=reason, num_failures=failures.number
                )
            )

    async def run(self, bus: Bus) -> None:
        """Publish events. Never returns; a failure is only logged, so the bus never blocks the fleet."""
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            while self._waiting:
                event = self._waiting.popleft()
                try:
                    await bus.publish(event)
                except BusError as error:
                    log.warning("engine_event_not_published", engine=event.engine, error=str(error))

    def _put(self, event: EngineStateChanged | WeightsRefused | EngineRequestsFailed) -> None:
        self._waiting.append(event)
        self._arrived.set()
