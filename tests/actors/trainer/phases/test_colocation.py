"""The first rank leads: what it tells the log, whom it asks and how often, and whose memory it moves."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import msgspec
import pytest

from actors.trainer.data.history import History
from actors.trainer.phases import colocation as colocation_module
from actors.trainer.phases.colocation import Colocation, EnginesKeepMemory
from messages import EnginePhase, Phase, PhaseChanged, PhaseReached, PhaseRequested, TrainerStarted
from runtime.bus.bus import Bus
from runtime.bus.roster import Member, Roster
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

GIB = 1 << 30
TURN = [phase.value for phase in Phase]
Answer = Callable[[PhaseRequested], PhaseReached]


class Rank:
    """A rank whose memory is a number."""

    def __init__(self) -> None:
        self.bytes = 3 * GIB
        self.moves: list[str] = []

    def held_bytes(self) -> int:
        return self.bytes

    def offload(self) -> None:
        self.moves.append("offload")
        self.bytes = GIB

    def onload(self) -> None:
        self.moves.append("onload")
        self.bytes = 3 * GIB


class Thread:
    """Runs at once."""

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)


class Rollout:
    """A rollout actor that answers as it is told, and remembers what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[PhaseRequested] = []
        self._answers = list(answers)

    async def answer(self, request: PhaseRequested) -> PhaseReached:
        self.asked.append(request)
        return self._answers.pop(0)(request) if self._answers else reached(request)


def reached(request: PhaseRequested) -> PhaseReached:
    engine = EnginePhase(engine="engine.policy.0", reached=True, bytes_before=2 * GIB, bytes_after=GIB)
    return PhaseReached(reached=True, engines=(engine,))


def not_yet(request: PhaseRequested) -> PhaseReached:
    return PhaseReached(reached=False, engines=(), reason="7 requests are under way")


def raising(request: PhaseRequested) -> PhaseReached:
    raise RuntimeError("it has just started")


@asynccontextmanager
async def present(bus: Bus, rollout: Rollout, instance: str = "rollout") -> AsyncGenerator[Member]:
    """A rollout actor on the roster."""
    member = Member(instance=instance, incarnation=1, node="local")
    await Roster(bus).join("rollout", member)
    async with bus.serve({PhaseRequested: rollout.answer}, instance=instance):
        yield member


def colocation_of(
    bus: Bus, rank: Rank, *, incarnation: int = 0, colocate: str | None = "trainer", **rollout: Any
) -> Colocation:
    topology: Topology = topology_with(
        engines={"policy": {"kind": "tiny", "colocate": colocate, "update_stall_s": 5.0}}, rollout=rollout
    )
    history = History()
    if incarnation:
        history.fold(TrainerStarted(incarnation=incarnation, step=0), 1)
    caught_up = anyio.Event()
    caught_up.set()
    colocation = Colocation(
        topology, bus, cast(Any, SimpleNamespace(history=history, caught_up=caught_up, start="one"))
    )
    colocation.lead(cast(Any, Thread()), cast(Any, rank))
    return colocation


async def told(bus: Bus) -> Sequence[PhaseChanged]:
    async with bus.read(PhaseChanged) as events:
        return [received.message async for received in events.so_far()]


async def test_a_step_is_one_turn_each_phase_told_with_what_the_one_before_moved(bus: Bus) -> None:
    rank, rollout, announced = Rank(), Rollout(), list[str]()

    async def announce() -> None:
        announced.append((await told(bus))[-1].phase)

    async with present(bus, rollout):
        colocation = colocation_of(bus, rank)
        await colocation.take_over()
        await colocation.give(0, announce)
        await colocation.take(0)
        await colocation.take(0)  # it has it already
        await colocation.give(1, announce)
    events = await told(bus)
    assert [event.phase for event in events] == [*TURN[2:], *TURN, "generate"]
    assert [event.previous for event in events] == [None, *(event.phase for event in events[:-1])]
    assert [request.phase for request in rollout.asked] == [*TURN[4:], "release", *TURN[4:]]
    assert announced == ["resume_weights"] * 2  # between room for them and their load
    assert rank.moves == ["offload", "onload", "offload"]
    after = {event.previous: event for event in events[7:]}
    assert after[Phase.OFFLOAD].bytes_before == {"trainer": 3 * GIB}
    assert after[Phase.OFFLOAD].bytes_after == {"trainer": GIB}
    assert after[Phase.RELEASE].bytes_before == {"engine.policy.0": 2 * GIB}
    assert after[Phase.RELEASE].bytes_after == {"engine.policy.0": GIB}
    assert after[Phase.TRAIN].bytes_after == {"trainer": 3 * GIB}
    assert all(event.took_s >= 0 and event.incarnation == 1 for event in events)


async def test_a_later_incarnation_has_engines_give_back_before_anything_else(bus: Bus) -> None:
    rollout = Rollout()
    async with present(bus, rollout):
        colocation = colocation_of(bus, Rank(), incarnation=3)
        await colocation.take_over()
    events = await told(bus)
    assert [(event.phase, event.incarnation) for event in events] == [("release", 4), ("train", 4)]
    assert events[0].reason == "trainer incarnation 4 starts"
    assert [(request.phase, request.incarnation) for request in rollout.asked] == [("release", 4)]


async def test_who_is_not_ready_or_fails_is_asked_again_and_a_restarted_one_too(bus: Bus) -> None:
    slow, quick = Rollout(not_yet, raising), Rollout()
    async with present(bus, slow), present(bus, quick, "rollout.1"):
        colocation = colocation_of(bus, Rank(), incarnation=1)
        await colocation.take_over()
    assert (len(slow.asked), len(quick.asked)) == (3, 1)
    assert len({(request.phase, request.seq) for request in slow.asked}) == 1


async def test_one_that_comes_back_while_others_are_awaited_is_asked_anew(bus: Bus) -> None:
    joined = anyio.Event()

    def until_joined(request: PhaseRequested) -> PhaseReached:
        return reached(request) if joined.is_set() else not_yet(request)

    slow, restarted = Rollout(*[until_joined] * 50), Rollout()
    async with present(bus, slow), present(bus, restarted, "rollout.1") as member, anyio.create_task_group() as group:
        colocation = colocation_of(bus, Rank(), incarnation=1)
        group.start_soon(colocation.take_over)
        await eventually(lambda: bool(restarted.asked))
        await Roster(bus).join("rollout", msgspec.structs.replace(member, incarnation=2))
        joined.set()
    assert len(restarted.asked) == 2


async def test_without_its_memory_the_trainer_ends_and_else_it_goes_on(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocation_module, "WITHIN_S", 0.1)
    silent = Rollout(*[not_yet] * 10_000)
    async with present(bus, silent):
        colocation = colocation_of(bus, Rank())
        colocation._update_s, colocation._release_s = 0.3, 0.6
        await colocation.take_over()
        await colocation.give(0)  # nobody says that engines are there: they will follow the log
        assert colocation.waits_for() == ""
        with pytest.raises(EnginesKeepMemory, match=r"phase release was not reached within .* by rollout"):
            await colocation.take(0)
    assert [event.phase for event in await told(bus)] == [*TURN[2:], "generate", "release"]


async def test_a_checkpoint_while_engines_generate_takes_a_turn_of_its_own(bus: Bus) -> None:
    rank, rollout = Rank(), Rollout()
    async with present(bus, rollout):
        colocation = colocation_of(bus, rank)
        await colocation.take_over()
        async with colocation.taken(0):  # it has the memory: nothing is moved
            assert rank.moves == []
        await colocation.give(0)
        async with colocation.taken(0):
            assert (rank.moves, rank.bytes) == (["offload", "onload"], 3 * GIB)
        assert rank.bytes == GIB
    assert [event.phase for event in await told(bus)] == [*TURN[2:], *TURN, "generate"]


async def test_where_memory_is_not_shared_nothing_is_told_or_asked(bus: Bus) -> None:
    announced = list[int]()

    async def announce() -> None:
        announced.append(1)

    colocation = colocation_of(bus, Rank(), incarnation=2, colocate=None)
    await colocation.take_over()
    await colocation.take(0)
    await colocation.give(1, announce)
    async with colocation.taken(1):
        pass
    assert (announced, await told(bus), colocation.is_on) == ([1], [], False)
