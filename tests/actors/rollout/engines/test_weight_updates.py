"""New weights beside all else: halts pass them, each engine takes them by itself, an evaluation holds them back."""

import anyio
import pytest

from actors.rollout.engines.weights.updater import CONTINUE_TRIES, Updater
from actors.rollout.sglang.errors import EngineError, EngineSilent, RequestRefused
from messages import (
    EngineState,
    EngineStateChanged,
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    GroupAborted,
    RoundHalted,
    WeightsApplied,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


async def test_a_halt_does_not_wait_for_an_engine_that_takes_weights(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine(hold=True)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        await engine.wait_for_requests(2)
        engine.update_at = anyio.Event()
        await bus.publish(announcement(2))
        await eventually(lambda: engine.calls.count("update") == 2)
        await bus.publish(RoundHalted(incarnation=1, round=0))
        await next_event(bus, GroupAborted)
        assert engine.updates == ["/weights/v1"]
        engine.update_at.set()
        await eventually(lambda: engine.held == 2)


async def test_an_engine_that_hangs_while_it_takes_weights_holds_up_no_other(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine(update_at=anyio.Event())) as hanging,
        serving(ScriptedEngine()) as engine,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [hanging, engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await completed(bus)
            assert hanging.updates == []
            await bus.publish(announcement(2))
            await eventually(lambda: engine.held == 2)
            hanging.update_at.set()
            await eventually(lambda: hanging.held == 2)
        group.cancel_scope.cancel()
    assert hanging.updates == ["/weights/v1", "/weights/v2"]  # the latest, before it was counted in


async def test_of_announcements_that_come_during_an_update_the_last_one_is_taken(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(announcement(1))
        await next_event(bus, WeightsApplied)
        engine.update_at = anyio.Event()
        for version in (2, 3, 4):
            await bus.publish(announcement(version))
        await eventually(lambda: engine.calls.count("update") == 2)
        engine.update_at.set()
        await eventually(lambda: engine.held == 4)
    assert engine.updates[-1] == "/weights/v4"
    assert len(engine.updates) <= 3


async def test_an_evaluation_holds_its_weights_also_over_a_restart_of_the_actor(bus: Bus, router_url: str) -> None:
    issued = EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="s", num_items=1),))
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            for event in (announcement(1), issued, announcement(2)):
                await bus.publish(event)
            await next_event(bus, WeightsApplied)
        async with serving(ScriptedEngine()) as other:
            await bus.kv.put(address_key("engine", "policy", 0), Address(url=other.url))
            async with rollout_actor(bus, router_url, [other], topology_with()):
                await eventually(lambda: other.held == 1)
                await bus.publish(EvalEnded(incarnation=1, step=0, version=1, metrics={}))
                await eventually(lambda: other.held == 2)
    assert (engine.updates, other.updates) == (["/weights/v1"], ["/weights/v1", "/weights/v2"])


async def until_admitted(bus: Bus, number: int) -> None:
    """Wait until so many engines may be asked."""
    admitted: set[str] = set()
    async with bus.read(EngineStateChanged) as events:
        while len(admitted) < number:
            received = await events.next(15)
            assert received is not None
            if received.message.new is EngineState.CURRENT:
                admitted.add(received.message.engine)


@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
async def test_it_is_told_how_long_each_engine_stood_still(bus: Bus, router_url: str, mode: str) -> None:
    topology = topology_with(rollout={"on_weight_update": mode, "max_staleness": 1})
    async with (
        serving(ScriptedEngine()) as quick,
        serving(ScriptedEngine()) as slow,
        rollout_actor(bus, router_url, [quick, slow], topology),
    ):
        await bus.publish(announcement(1))
        await until_admitted(bus, 2)
        slow.update_at = anyio.Event()
        announced = anyio.current_time()
        await bus.publish(announcement(2))
        await eventually(lambda: slow.calls.count("update") == 2)
        begin = anyio.current_time()
        await eventually(lambda: quick.held == 2)
        at_least_s = anyio.current_time() - begin
        slow.update_at.set()
        applied = await until_applied(bus, 2)
        at_most_s = anyio.current_time() - announced
    assert [update.engine for update in applied.engines] == ["engine.policy.0", "engine.policy.1"]
    of_quick, of_slow = applied.engines
    assert 0 < at_least_s <= of_slow.pause_s < of_slow.took_s <= applied.took_s <= at_most_s
    assert 0 < of_quick.pause_s < of_quick.took_s <= applied.took_s


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_engine_is_paused_for_the_weights_and_goes_on_whatever_becomes_of_them(
    bus: Bus, router_url: str, mode: str
) -> None:
    topology = topology_with(rollout={"on_weight_update": mode, "max_staleness": 1})
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        await next_event(bus, WeightsApplied)
        assert engine.calls[-3:] == [mode, "update", "continue"]
        assert [body["flush_cache"] for body in engine.update_bodies] == [mode == "retract"]
        engine.refuses_weights = True
        await bus.publish(announcement(2))
        await eventually(lambda: engine.calls[3:6] == [mode, "update", "continue"])


async def test_an_engine_that_a_dead_actor_left_paused_goes_on_before_it_is_admitted(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine(paused=True)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await completed(bus)
        group.cancel_scope.cancel()
    assert engine.calls[0] == "continue"


async def test_an_actor_that_ends_in_the_middle_of_an_update_lets_its_engine_go_on(bus: Bus, router_url: str) -> None:
    topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1})
    async with serving(ScriptedEngine(update_at=anyio.Event())) as engine:
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await eventually(lambda: engine.calls == ["in_place", "update"])
        await eventually(lambda: not engine.paused)
    assert engine.calls == ["in_place", "update", "continue"]


class Deaf:
    """An engine that is paused and does not load, for a reason, and cannot be told to go on."""

    def __init__(self, error: EngineError) -> None:
        self.error = error
        self.num_told = 0

    async def pause(self, _url: str, _mode: str) -> None:
        """It does."""

    async def update_weights(self, *_: object, **__: object) -> None:
        raise self.error

    async def loads(self, _url: str) -> None:
        """It says nothing."""

    async def proceed(self, _url: str) -> None:
        self.num_told += 1
        raise EngineSilent("no answer")


@pytest.mark.parametrize(("error", "times"), [(EngineSilent("no answer"), 1), (RequestRefused("no"), CONTINUE_TRIES)])
async def test_an_engine_that_gave_no_answer_to_an_update_is_told_once_to_go_on(error: EngineError, times: int) -> None:
    """Whoever looks at it next tells it again, or has it killed; each time may take 10 s."""
    client = Deaf(error)
    updater = Updater(client, "in_place")
    with pytest.raises(type(error)):
        async with updater.loaded("http://e", announcement(1), "1@e", None, is_compared=False):
            pytest.fail("it does not load")
    assert (client.num_told, updater.is_paused("http://e")) == (times, True)
