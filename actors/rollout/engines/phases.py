"""Follows the colocation phases led by the trainer, and reports the progress of the engines.

The log defines the phase; an RPC only waits until the engines have reached it. So a call may be repeated, arrive late,
or reach a rollout actor that has just started.
"""

from typing import Final

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.status import MemoryLevel
from actors.rollout.requests.interrupting import RunningRequests
from messages import EnginePhase, Phase, PhaseChanged, PhaseReached, PhaseRequested
from runtime.ledger.phases import CurrentPhase, fold_phase

log = structlog.get_logger()

QUIET_LOOK_S: Final = 1.0  # between two checks for running requests
LEVEL_OF: Final = {  # allowed memory in each phase
    Phase.GENERATE: MemoryLevel.EVERYTHING,
    Phase.RELEASE: MemoryLevel.NOTHING,
    Phase.TRAIN: MemoryLevel.NOTHING,
    Phase.OFFLOAD: MemoryLevel.NOTHING,
    Phase.RESUME_WEIGHTS: MemoryLevel.WEIGHTS,
    Phase.UPDATE: MemoryLevel.LOADED,
    Phase.RESUME_KV: MemoryLevel.EVERYTHING,
}
SENDS: Final = frozenset({Phase.GENERATE, Phase.RESUME_KV})  # phases in which ready engines get requests


class PhaseFollower:
    """Brings a rollout actor's engines to the memory level of each phase.

    Args:
        fleet: the engines.
        running: the running requests on the engines.
        num_engines: number of engines that the run starts; an address may appear later than the phase.
    """

    def __init__(self, fleet: Fleet, running: RunningRequests, num_engines: int) -> None:
        self._fleet = fleet
        self._num_engines = num_engines
        self._running = running
        self._logged: CurrentPhase | None = None  # the phase at the current position in the log
        self._followed: CurrentPhase | None = None  # the phase that the engines are moving to
        self._changed = anyio.Event()  # replaced after each wait
        # set once the engines' memory level is known from the log; no calls to engines before
        self.known = anyio.Event()

    def fold(self, event: PhaseChanged, seq: int) -> None:
        """Apply the next event of the log."""
        self._logged = fold_phase(self._logged, event, seq)

    def follow(self) -> None:
        """Act on the folded events. Called at the end of the log, so that outdated phases are skipped."""
        if self._logged is not self._followed:
            self._followed = self._logged
            self._changed.set()

    async def run(self) -> None:
        """Follow the phases. Never returns."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            phase = self._followed
            if phase is not None:
                await self._bring_to(phase)

    async def _bring_to(self, phase: CurrentPhase) -> None:
        wanted = LEVEL_OF[phase.phase]
        await self._fleet.serving.hold(phase.phase not in SENDS)
        if wanted is MemoryLevel.NOTHING:
            while self._running.open and not self._changed.is_set():
                await self._running.any_ended(QUIET_LOOK_S)
            if self._changed.is_set():
                return
        await self._fleet.allow(wanted)
        self.known.set()

    async def answer(self, request: PhaseRequested) -> PhaseReached:
        """Wait until the engines have reached a phase, at most for the requested time."""
        with anyio.move_on_after(request.within_s):
            await self._fleet.until(lambda: self._is_known(request))
            if not self._objection(request):
                await self._fleet.until(lambda: self._is_reached(request))
        objection = self._objection(request)
        engines = tuple(phase_report(engine, LEVEL_OF[request.phase]) for engine in self._fleet.engines)
        if objection:
            return PhaseReached(reached=False, engines=engines, reason=objection)
        reason = self._reason(request)
        return PhaseReached(reached=not reason, engines=engines, reason=reason)

    def _is_known(self, request: PhaseRequested) -> bool:
        phase = self._followed
        return phase is not None and (phase.seq >= request.seq or phase.incarnation > request.incarnation)

    def _objection(self, request: PhaseRequested) -> str:
        """Return why the requested phase is not the current one; empty if it is."""
        phase = self._followed
        if phase is None or not self._is_known(request):
            return "the rollout actor has not read the log that far yet"
        if phase.incarnation != request.incarnation:
            return f"trainer incarnation {phase.incarnation} leads, not {request.incarnation}"
        return "" if phase.phase is request.phase else f"the phase is now {phase.phase}"

    def _is_reached(self, request: PhaseRequested) -> bool:
        return bool(self._objection(request)) or not self._reason(request)

    def _reason(self, request: PhaseRequested) -> str:
        """Return what the phase still waits for; empty if it is complete."""
        wanted = LEVEL_OF[request.phase]
        if wanted is MemoryLevel.NOTHING and self._fleet.allowed is not MemoryLevel.NOTHING:
            return f"{len(self._running.open)} requests are running"
        if wanted is MemoryLevel.NOTHING and len(self._fleet.engines) < self._num_engines:
            return f"{len(self._fleet.engines)} of {self._num_engines} engines have reported their memory level"
        left = [engine.name for engine in self._fleet.engines if is_missing(engine, wanted)]
        return f"waiting for {', '.join(left)}" if left else ""


def is_missing(engine: Engine, wanted: MemoryLevel) -> bool:
    """Whether a phase still waits for an engine."""
    return is_awaited(wanted, answers=engine.status.answers) and not is_there(engine.status.memory_level, wanted)


def phase_report(engine: Engine, wanted: MemoryLevel) -> EnginePhase:
    """Return an engine's part of the phase report."""
    if is_there(engine.status.memory_level, wanted):
        return engine.memory_share.moved(wanted)
    return EnginePhase(engine=engine.name, reached=False, reason=engine.status.reason or f"it is {engine.state}")


def is_there(memory_level: MemoryLevel, wanted: MemoryLevel) -> bool:
    """Whether an engine has reached the wanted level. NOTHING must be reached exactly, other levels may be exceeded."""
    return memory_level is MemoryLevel.NOTHING if wanted is MemoryLevel.NOTHING else memory_level >= wanted


def is_awaited(wanted: MemoryLevel, *, answers: bool) -> bool:
    """Whether a phase waits for an engine.

    A phase with level NOTHING waits for all engines: one that is down may be starting and take memory.
    """
    return answers or wanted is MemoryLevel.NOTHING
