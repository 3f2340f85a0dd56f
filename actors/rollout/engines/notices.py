"""What a fleet tells the run's log of its engines, only so often: one that comes and goes must not fill the log."""

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

BURST: Final = 8  # changes of an engine that are told whenever they come
REFILL_S: Final = 60.0  # after which one more is
FIRST_REFUSAL_S: Final = 10.0  # to the second telling that an engine refuses a version; doubled from there
REASON_CHARS: Final = 500
BOUND: Final = 1000  # waiting to be told


@dataclass
class Allowance:
    """How many changes of one engine may be told. Pure."""

    left: float = BURST
    counted_at: float = 0.0
    num_untold: int = 0  # since one was

    def take(self, now: float) -> bool:
        """Whether a change may be told now, in seconds of any clock."""
        self.left = min(float(BURST), self.left + (now - self.counted_at) / REFILL_S)
        self.counted_at = now
        if self.left < 1.0:
            self.num_untold += 1
            return False
        self.left -= 1.0
        return True


@dataclass
class Refusals:
    """How often an engine refused one version, and when that is told next. Pure."""

    version: int
    unusable: bool = False  # its files
    number: int = 0
    due_at: float = -math.inf
    gap_s: float = FIRST_REFUSAL_S

    def take(self, now: float) -> bool:
        """Count one, and whether it is told."""
        self.number += 1
        if now < self.due_at:
            return False
        if now > self.due_at + self.gap_s:  # it was quiet for long
            self.gap_s = FIRST_REFUSAL_S
        self.due_at, self.gap_s = now + self.gap_s, 2 * self.gap_s
        return True


class Notices:
    """Events about engines, in the order in which they happened."""

    def __init__(self, instance: str = "") -> None:
        self._instance = instance
        self._allowances: dict[str, Allowance] = {}
        self._refusals: dict[str, Refusals] = {}
        self._failures: dict[tuple[str, str], Refusals] = {}  # of requests, by engine and kind
        self._waiting = deque[EngineStateChanged | WeightsRefused | EngineRequestsFailed](
            maxlen=BOUND
        )  # the oldest give way
        self._arrived = anyio.Event()

    def changed(self, engine: str, old: EngineState, new: EngineState, reason: str, version: int) -> None:
        """Tell that an engine is in another state."""
        now = anyio.current_time()
        allowance = self._allowances.setdefault(engine, Allowance(counted_at=now))
        if not allowance.take(now):
            return
        event = EngineStateChanged(
            instance=self._instance,
            engine=engine,
            old=old,
            new=new,
            reason=clipped(reason, REASON_CHARS),
            version=version,
            num_untold=allowance.num_untold,
        )
        allowance.num_untold = 0
        self._put(event)

    def refused(self, engine: str, version: int, reason: str, *, unusable: bool = False) -> None:
        """Tell that an engine does not work under a version of the weights, or that no engine can, for its files."""
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
        """Tell that a request to an engine that is up failed; of each kind of failure seldom."""
        failures = self._failures.setdefault((engine, kind), Refusals(0))
        if failures.take(anyio.current_time()):
            reason = clipped(reason, REASON_CHARS)
            self._put(
                EngineRequestsFailed(
                    instance=self._instance, engine=engine, reason=reason, num_failures=failures.number
                )
            )

    async def run(self, bus: Bus) -> None:
        """Publish, for ever. What cannot be is logged: the fleet waits for nobody."""
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            while self._waiting:
                event = self._waiting.popleft()
                try:
                    await bus.publish(event)
                except BusError as error:
                    log.warning("engine_event_not_told", engine=event.engine, error=str(error))

    def _put(self, event: EngineStateChanged | WeightsRefused | EngineRequestsFailed) -> None:
        self._waiting.append(event)
        self._arrived.set()
