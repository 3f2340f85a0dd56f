"""A rollout actor that takes turns with a trainer: scripted engines, the real router, phases as a trainer says them."""

import os
import subprocess
from contextlib import AsyncExitStack

import anyio
import pytest

from actors.rollout.engines.memory import MemoryNotes
from messages import (
    EngineState,
    EngineStateChanged,
    GroupCompleted,
    Message,
    Phase,
    PhaseChanged,
    PhaseReached,
    PhaseRequested,
    WeightsApplied,
    WeightSyncAnswered,
    WeightSyncRequested,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import PROBE, announcement, completed, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ALL = "cuda_graph kv_cache weights"
REST = "cuda_graph kv_cache"
CALL_S = 50.0


def colocated() -> Topology:
    return topology_with(engines={"policy": {"kind": "tiny", "colocate": "trainer", "concurrency": 8}})


class Trainer:
    """Tells of phases and asks the rollout actor, as the trainer's first rank does."""

    def __init__(self, bus: Bus, incarnation: int = 1) -> None:
        self._bus = bus
        self.incarnation = incarnation
        self.seq = 0

    async def begin(self, phase: Phase) -> None:
        self.seq = await self._bus.publish(PhaseChanged(phase=phase, step=0, incarnation=self.incarnation))

    async def ask(self, phase: Phase, within_s: float = 0.3) -> PhaseReached:
        request = PhaseRequested(phase=phase, incarnation=self.incarnation, seq=self.seq, within_s=within_s)
        return await self._bus.call("rollout", request, PhaseReached, timeout_s=CALL_S)

    async def reach(self, phase: Phase) -> PhaseReached:
        """Begin a phase and wait until the engines are there."""
        await self.begin(phase)
        with anyio.fail_after(CALL_S):
            while not (answer := await self._asked(phase)).reached:
                pass
        return answer

    async def _asked(self, phase: Phase) -> PhaseReached:
        try:
            return await self.ask(phase, 5.0)
        except BusError:  # it may be starting
            await anyio.sleep(0.05)
            return PhaseReached(reached=False, engines=())

    async def bring_back(self, version: int) -> None:
        """All from the trainer's last phase to the engines' turn."""
        await self.reach(Phase.RESUME_WEIGHTS)
        await self._bus.publish(announcement(version))
        await self.reach(Phase.UPDATE)
        await self.reach(Phase.RESUME_KV)
        await self.begin(Phase.GENERATE)


async def test_an_engine_gives_its_memory_back_and_takes_it_in_order_each_once(bus: Bus, router_url: str) -> None:
    trainer = Trainer(bus)
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], colocated()),
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        await trainer.begin(Phase.TRAIN)
        await eventually(lambda: engine.calls == [f"release {ALL}"])
        await trainer.reach(Phase.RESUME_WEIGHTS)
        assert engine.calls[1:] == ["resume weights"]
        await bus.publish(announcement(1, probe=PROBE))
        answer = await trainer.reach(Phase.UPDATE)
        assert engine.calls[2:] == ["update", "in_place", "continue"]
        assert (engine.checks, engine.probes) == (["paused"], [])  # what can be proven without keys and values is
        assert [one.reached for one in answer.engines] == [True]
        await bus.publish(task(0))
        await trainer.reach(Phase.RESUME_KV)
        assert engine.calls[5:] == [f"resume {REST}"]
        assert len(engine.probes) == 1
        assert isinstance((await next_event(bus, WeightsApplied))[0], WeightsApplied)
        await trainer.begin(Phase.GENERATE)
        await completed(bus)
        for _ in range(2):
            await trainer.reach(Phase.RELEASE)
            assert (await trainer.ask(Phase.RELEASE)).reached  # asked twice does no harm
        assert engine.calls[6:] == [f"release {ALL}"]
        assert engine.given_back == set(ALL.split())
        group.cancel_scope.cancel()


async def test_an_engine_that_stands_ready_for_a_session_gives_its_memory_back(bus: Bus, router_url: str) -> None:
    """A trainer that died before it brought weights brings none; the next one wants the memory first."""
    asked = anyio.Event()

    async def note(_: Message) -> WeightSyncAnswered:
        asked.set()
        return WeightSyncAnswered(failed={"engine": "no"})

    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], colocated()),
        bus.serve({WeightSyncRequested: note}),
    ):
        trainer = Trainer(bus)
        await trainer.begin(Phase.TRAIN)
        await eventually(lambda: engine.calls == [f"release {ALL}"])
        await trainer.reach(Phase.RESUME_WEIGHTS)
        await bus.publish(announcement(1, transport="ipc", sender=bus.name))
        await trainer.begin(Phase.UPDATE)
        with anyio.fail_after(CALL_S):
            await asked.wait()
        await Trainer(bus, incarnation=2).reach(Phase.RELEASE)
        assert engine.calls[1:] == ["resume weights", "release weights"]


async def test_new_requests_wait_while_those_under_way_end(bus: Bus, router_url: str) -> None:
    trainer = Trainer(bus)
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], colocated()),
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        await trainer.begin(Phase.TRAIN)
        await trainer.bring_back(1)
        engine.hold = True
        await bus.publish(task(0))
        await engine.wait_for_requests(2)
        await trainer.begin(Phase.RELEASE)
        await bus.publish(task(1))
        answer = await trainer.ask(Phase.RELEASE)
        assert (answer.reached, answer.reason) == (False, "2 requests are running")
        assert engine.given_back == set()
        engine.release()
        await trainer.reach(Phase.RELEASE)
        await completed(bus)
        await trainer.begin(Phase.TRAIN)
        assert len(engine.requests) == 2
        await trainer.bring_back(2)
        async with bus.read(GroupCompleted) as groups:
            for group_id in (0, 1):
                received = await groups.next(CALL_S)
                assert received is not None
                assert received.message.group_id == group_id
        group.cancel_scope.cancel()
    assert engine.updates == ["/weights/v1", "/weights/v2"]


async def test_a_rollout_actor_that_comes_back_knows_what_its_engines_gave_back(bus: Bus, router_url: str) -> None:
    trainer = Trainer(bus)
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], colocated()):
            await trainer.begin(Phase.TRAIN)
            await trainer.reach(Phase.RELEASE)
        async with rollout_actor(bus, router_url, [engine], colocated()):
            await trainer.reach(Phase.RELEASE)
            await trainer.reach(Phase.RESUME_WEIGHTS)
            await eventually(lambda: "resume weights" in engine.calls)
        async with rollout_actor(bus, router_url, [engine], colocated()):
            await bus.publish(announcement(1))
            await trainer.reach(Phase.UPDATE)
            await trainer.reach(Phase.RESUME_KV)
            await until_applied(bus, 1)
    kept = [call for call in engine.calls if call.startswith("re")]
    assert kept == [f"release {ALL}", "resume weights", f"resume {REST}"]


async def test_an_engine_of_which_nobody_knows_what_it_has_is_suspect(bus: Bus, router_url: str) -> None:
    trainer = Trainer(bus)
    async with serving(ScriptedEngine(fails_to_resume=True)) as engine:
        async with rollout_actor(bus, router_url, [engine], colocated()):
            await trainer.reach(Phase.RELEASE)
            await trainer.begin(Phase.RESUME_WEIGHTS)
            await _until_state(bus, EngineState.SUSPECT)
            assert (await trainer.ask(Phase.RESUME_WEIGHTS)).reached  # it is not waited for
            calls = list(engine.calls)
        async with rollout_actor(bus, router_url, [engine], colocated()):  # which finds it so
            await _until_state(bus, EngineState.SUSPECT, times=2)
            assert engine.calls == calls


async def test_an_engine_that_comes_up_while_the_trainer_trains_gives_its_memory_back_at_once(
    bus: Bus, router_url: str
) -> None:
    trainer = Trainer(bus)
    async with (
        serving(ScriptedEngine()) as engine,
        serving(ScriptedEngine()) as late,
        rollout_actor(bus, router_url, [engine], colocated()),
    ):
        await trainer.reach(Phase.RELEASE)
        await trainer.begin(Phase.TRAIN)
        address = Address(url=late.url, agent="agent", pid=os.getpid())
        await bus.kv.put(address_key("engine", "policy", 0), address)
        await eventually(lambda: late.calls == [f"release {ALL}"])
        await trainer.bring_back(1)
        await eventually(lambda: late.updates == ["/weights/v1"])
    assert engine.updates == []


async def test_the_release_waits_for_an_engine_that_is_down(bus: Bus, router_url: str) -> None:
    """Its start may be taking memory that the trainer needs."""
    trainer = Trainer(bus)
    async with serving(ScriptedEngine()) as engine, AsyncExitStack() as stack:
        down = await stack.enter_async_context(serving(ScriptedEngine()))
        async with rollout_actor(bus, router_url, [engine, down], colocated()):
            await trainer.reach(Phase.RELEASE)
            await trainer.bring_back(1)
            await stack.aclose()
            await trainer.begin(Phase.RELEASE)
            await _until_state(bus, EngineState.GONE)
            await eventually(lambda: engine.given_back == set(ALL.split()))
            answer = await trainer.ask(Phase.RELEASE)
            assert [one.reached for one in answer.engines] == [True, False]
            assert not answer.reached


async def test_an_older_trainer_is_refused(bus: Bus, router_url: str) -> None:
    old, new = Trainer(bus, 1), Trainer(bus, 2)
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], colocated()):
        await old.begin(Phase.TRAIN)
        await new.reach(Phase.RELEASE)
        await old.begin(Phase.RESUME_WEIGHTS)
        answer = await old.ask(Phase.RESUME_WEIGHTS)
        assert (answer.reached, answer.reason) == (False, "trainer incarnation 2 leads, not 1")
        late = await new.ask(Phase.TRAIN)
        assert (late.reached, late.reason) == (False, "the phase is now release")
        assert engine.calls == [f"release {ALL}"]


def pid_of_the_past() -> int:
    process = subprocess.Popen(["true"])
    process.wait(10)
    return process.pid


async def _until_state(bus: Bus, state: EngineState, times: int = 1) -> Message:
    with anyio.fail_after(CALL_S):
        async with bus.read(EngineStateChanged) as events:
            async for received in events:
                times -= received.message.new is state
                if not times:
                    return received.message
    raise AssertionError


async def test_a_process_that_took_the_place_of_one_that_gave_back_is_told_nothing_of_that(
    bus: Bus, router_url: str
) -> None:
    """It listens at the same port, and its address comes a moment later."""
    trainer, ended_pid = Trainer(bus), pid_of_the_past()
    key = address_key("engine", "policy", 0)
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [], colocated()):
        notes = MemoryNotes(bus.kv, "engine.policy.0", ended_pid)
        await notes.write(["kv_cache", "weights", "cuda_graph"], sure=True)
        await trainer.begin(Phase.RESUME_WEIGHTS)
        await bus.kv.put(key, Address(url=engine.url, pid=ended_pid))
        await _until_state(bus, EngineState.GONE)
        assert engine.calls == []
        assert (await trainer.ask(Phase.RESUME_WEIGHTS)).reached  # one that is down is not waited for
        await bus.kv.put(key, Address(url=engine.url, pid=os.getpid()))
        await bus.publish(announcement(1))
        await trainer.reach(Phase.UPDATE)
        await trainer.reach(Phase.RESUME_KV)
        await until_applied(bus, 1)
    assert [call for call in engine.calls if call.startswith("re")] == []
