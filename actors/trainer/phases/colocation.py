"""Runs the colocation phases: publishes each one, calls the rollout actors, and moves the trainer's own memory."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import structlog

from actors.trainer.data.feed import Feed
from actors.trainer.phases.states import CALLED, first_phase, must_all_answer, next_phase
from actors.trainer.torch_thread import TorchThread
from messages import EnginePhase, Phase, PhaseChanged, PhaseReached, PhaseRequested
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.roster import Member, Roster
from runtime.settings.placement import UpdateLimits
from runtime.settings.topology import Topology, is_colocated
from runtime.util.retrying import Backoff

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank

log = structlog.get_logger()

ROLE: Final = "rollout"
WITHIN_S: Final = 2.0  # a rollout actor reports its progress by then, and is called again
ANSWER_S: Final = 3.0  # more for transport; a call to an actor that dies takes the sum of both
RETRY: Final = Backoff(max_s=2.0)

Bytes = dict[str, int | None]
Work = Callable[[], Coroutine[Any, Any, None]]


class EnginesKeepMemory(Exception):
    """Engines did not release their memory in time. Training needs this memory."""


class Colocation:
    """Colocation in one trainer incarnation. Does nothing if trainer and engines have separate memory.

    A crash in any phase loses that phase: the next incarnation begins with `take_over`.
    """

    def __init__(self, topology: Topology, bus: Bus, feed: Feed) -> None:
        """Start before the first phase."""
        self._is_on = is_colocated(topology)
        self._bus = bus
        self._feed = feed
        self._roster = Roster(bus)
        pools = [engine for engine in topology.engines.values() if engine.colocate]
        self._limits = max((UpdateLimits.of(engine) for engine in pools), default=UpdateLimits())
        self._model = Path(topology.model.hf_checkpoint)
        self._update_s = self._limits.stall_s
        self._load_s = 0.0  # more, because engines load the weights of this phase without visible progress
        self._release_s = self._update_s + topology.rollout.generate_timeout_s  # running requests end first
        self._torch_thread: TorchThread | None = None
        self._rank: TrainerRank | None = None
        self._load: Work = anyio.lowlevel.checkpoint
        self._serve: Work = anyio.lowlevel.checkpoint
        self._incarnation = 0
        self._phase: Phase | None = None
        self._began = 0.0
        self._before: Bytes = {}
        self._after: Bytes = {}
        self._is_offloaded = False
        self._missing: tuple[str, ...] = ()  # rollout actors that did not answer yet

    @property
    def is_on(self) -> bool:
        """Whether trainer and engines share memory."""
        return self._is_on

    def waits_for(self) -> str:
        """Describe whose answer is awaited; empty: none."""
        if not self._missing or self._phase is None:
            return ""
        waited_s = time.monotonic() - self._began
        return f"{', '.join(self._missing)} to reach phase {self._phase}, for {waited_s:.0f} s"

    async def take_over(self) -> None:
        """Claim the memory for this incarnation, before it builds its model.

        Raises:
            EnginesKeepMemory: engines did not release it in time.
        """
        if not self._is_on:
            return
        await self._feed.caught_up.wait()
        history = self._feed.history
        self._incarnation = history.incarnation + 1
        is_first_start = history.incarnation == 0 and history.current_phase is None
        self._phase = None if history.current_phase is None else history.current_phase.phase
        self._began = time.monotonic()
        phase = first_phase(is_first_start=is_first_start)
        if phase is Phase.RELEASE:
            await self._enter(phase, history.frontier, reason=f"trainer incarnation {self._incarnation} starts")
            await self._enter(Phase.TRAIN, history.frontier)
        else:
            await self._enter(phase, history.frontier, reason="the run begins")

    def lead(self, torch_thread: TorchThread, rank: "TrainerRank") -> None:
        """Set the rank whose memory is moved, and its torch thread."""
        self._torch_thread, self._rank = torch_thread, rank

    def load_by(self, load: Work, serve: Work) -> None:
        """Set the functions that sync weights in the update phase and the phase after it.

        Engines request a weight sync later if their rollout actor has died, because their weights are then unverified.
        Both functions are cancelled at the end of their phase.

        Args:
            load: syncs weights to all engines, in the update phase.
            serve: syncs weights to engines that request it later.
        """
        self._load, self._serve = load, serve

    async def take(self, step: int) -> None:
        """Claim the memory for training, unless the trainer holds it.

        Raises:
            EnginesKeepMemory: engines did not release it in time.
        """
        if self._phase is not Phase.GENERATE:
            return
        await self._enter(Phase.RELEASE, step)
        await self._enter(Phase.TRAIN, step)
        await self._onload()

    async def give(
        self, step: int, announce: Callable[[], Awaitable[object]] | None = None, size_bytes: int = 0
    ) -> None:
        """Announce weights. With colocation, also hand the trainer's memory over to the engines.

        Args:
            step: train steps done.
            announce: publishes the weights; None: engines keep their version.
            size_bytes: of the weights' files; 0: there are none, and the model's own files show the size.
        """
        if self._phase is not Phase.TRAIN:
            if announce is not None:
                await announce()
            return
        self._load_s = self._limits.load_s(size_bytes or _files_bytes(self._model)) - self._limits.stall_s
        await self._enter(Phase.OFFLOAD, step)
        await self._offload()
        await self._enter(Phase.RESUME_WEIGHTS, step)
        if announce is not None:
            await announce()
        for phase in (Phase.UPDATE, Phase.RESUME_KV, Phase.GENERATE):
            await self._enter(phase, step)

    @asynccontextmanager
    async def taken(self, step: int) -> AsyncGenerator[None]:
        """Hold the memory for training within a block; return it to the engines afterwards if they had it."""
        if self._phase is not Phase.GENERATE:
            yield
            return
        await self.take(step)
        yield
        await self.give(step)

    async def _enter(self, phase: Phase, step: int, *, reason: str = "") -> None:
        """Begin a phase, and wait until the engines have done their part of it."""
        now = time.monotonic()
        changed = PhaseChanged(
            phase=phase,
            previous=self._phase,
            step=step,
            incarnation=self._incarnation,
            start=self._feed.start,
            reason=reason,
            took_s=0.0 if self._phase is None else now - self._began,
            bytes_before=self._before,
            bytes_after=self._after,
        )
        assert reason or self._phase is None or next_phase(self._phase) is phase
        seq = await self._bus.publish(changed)
        self._phase, self._began, self._before, self._after = phase, now, {}, {}
        log.info("phase_changed", phase=phase, previous=changed.previous, took_s=changed.took_s, step=step)
        if phase is Phase.UPDATE:
            async with in_background(self._load_and_serve):
                await self._call(phase, seq)
        elif phase is Phase.RESUME_KV:
            async with in_background(self._serve):
                await self._call(phase, seq)
        elif phase in CALLED:
            await self._call(phase, seq)

    async def _load_and_serve(self) -> None:
        await self._load()
        await self._serve()

    async def _call(self, phase: Phase, seq: int) -> None:
        """Call every rollout actor until all engines have reached a phase.

        Raises:
            EnginesKeepMemory: all engines must reach the phase, and did not in time.
        """
        limit_s = self._release_s if must_all_answer(phase) else self._update_s + self._load_s
        request = PhaseRequested(phase=phase, incarnation=self._incarnation, seq=seq, within_s=WITHIN_S)
        reached: dict[Member, PhaseReached] = {}
        with anyio.move_on_after(limit_s) as scope:
            await self._ask_all(request, reached)
        missing, self._missing = self._missing, ()
        if not scope.cancelled_caught:
            return
        log.warning("phase_not_reached", phase=phase, missing=missing, within_s=limit_s)
        if must_all_answer(phase):
            raise EnginesKeepMemory(f"phase {phase} was not reached within {limit_s:g} s by {', '.join(missing)}")

    async def _ask_all(self, request: PhaseRequested, reached: dict[Member, PhaseReached]) -> None:
        failures = 0
        while True:
            members = await self._members()
            left = [member for member in members if member not in reached]
            if not left and (members or not must_all_answer(request.phase)):
                return
            self._missing = tuple(member.instance for member in left) or ("a rollout actor",)
            before = len(reached)
            async with anyio.create_task_group() as group:
                for member in left:
                    group.start_soon(self._ask, member, request, reached)
            if len(reached) == before:
                failures += 1
                await anyio.sleep(RETRY.pause_s(failures))

    async def _members(self) -> tuple[Member, ...]:
        try:
            return (await self._roster.members(ROLE)).members
        except BusError as error:
            log.warning("roster_not_read", role=ROLE, error=str(error))
            return (Member(instance=ROLE, incarnation=0, node=""),)  # a rollout actor may be running

    async def _ask(self, member: Member, request: PhaseRequested, reached: dict[Member, PhaseReached]) -> None:
        try:
            answer = await self._bus.call(member.instance, request, PhaseReached, timeout_s=request.within_s + ANSWER_S)
        except BusError as error:
            log.warning("phase_not_answered", phase=request.phase, instance=member.instance, error=str(error))
            return
        if not answer.reached:
            log.info("phase_awaited", phase=request.phase, instance=member.instance, reason=answer.reason)
            return
        reached[member] = answer
        self._note(answer.engines)

    def _note(self, engines: tuple[EnginePhase, ...]) -> None:
        for engine in engines:
            if engine.reached:
                self._before[engine.engine], self._after[engine.engine] = engine.bytes_before, engine.bytes_after

    async def _offload(self) -> None:
        thread, rank = self._thread_and_rank()
        self._before["trainer"] = await thread.run(rank.held_bytes)
        await thread.run(rank.offload)
        self._is_offloaded = True
        self._after["trainer"] = await thread.run(rank.held_bytes)

    async def _onload(self) -> None:
        if not self._is_offloaded:
            return
        thread, rank = self._thread_and_rank()
        self._before["trainer"] = await thread.run(rank.held_bytes)
        await thread.run(rank.onload)
        self._is_offloaded = False
        self._after["trainer"] = await thread.run(rank.held_bytes)

    def _thread_and_rank(self) -> "tuple[TorchThread, TrainerRank]":
        assert self._torch_thread is not None
        assert self._rank is not None
        return self._torch_thread, self._rank


def _files_bytes(directory: Path) -> int:
    """Return the size of a model's files in bytes."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
