"""What becomes of engines is in the log, with the reason; an update is told by weights.applied alone."""

import pytest

from messages import EngineState, EngineStateChanged, WeightsApplied, WeightsRefused
from runtime.bus.bus import Bus
from runtime.report.report import Line, Report
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import PROBE, announcement, next_event, rollout_actor, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


async def changes(bus: Bus, number: int) -> list[tuple[str, str, str]]:
    """The first changes of state in the log."""
    async with bus.read(EngineStateChanged) as events:
        found = [await events.next(40) for _ in range(number)]
    return [(one.message.old, one.message.new, one.message.reason) for one in found if one is not None]


async def test_changes_of_an_engine_are_told_and_updates_only_by_weights_applied(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        for version in (1, 2, 3):
            await bus.publish(announcement(version))
            await until_applied(bus, version)
        engine.refuses_weights = True
        await bus.publish(announcement(4))
        found = await changes(bus, 2)
        applied, _ = await next_event(bus, WeightsApplied)
    assert found[0] == ("starting", "current", "verified weights 1")
    old, new, reason = found[1]
    assert (old, new) == ("updating", "starting")
    assert "no such directory" in reason
    assert isinstance(applied, WeightsApplied)


async def test_refused_weights_are_on_the_terminal_at_the_first_refusal_and_do_not_fill_the_log(
    bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine(prompt_log_prob=-0.6)) as engine:
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1, probe=PROBE))
            refused, seq = await next_event(bus, WeightsRefused)
            await eventually(lambda: engine.calls.count("update") >= 4)
            async with bus.read(WeightsRefused, from_seq=seq + 1) as events:
                assert await events.next(0.2) is None
    assert isinstance(refused, WeightsRefused)
    assert (refused.engine, refused.version, refused.num_refusals) == ("engine.policy.0", 1, 1)
    (line,) = Report("r", 1, 0.0).apply(refused, seq, 1.0)
    assert isinstance(line, Line)
    assert line.text.startswith("engine.policy.0 does not work with weights v1: ")
    assert "differ from the trainer's by 0.1 nats on average; allowed: 0.001, for float32" in line.text


async def test_an_engine_of_ours_that_an_earlier_actor_paused_goes_on(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine(paused=True)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
    ):
        await bus.publish(announcement(1))
        await until_applied(bus, 1)
    assert engine.calls[0] == "continue"


async def test_an_engine_of_others_that_is_paused_is_left_so_until_they_continue_it(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine(paused=True)) as engine:
        pool = {"policy": {"kind": "tiny", "concurrency": 8, "urls": [engine.url]}}
        async with rollout_actor(bus, router_url, [], topology_with(engines=pool)):
            await bus.publish(announcement(1))
            async with bus.read(WeightsApplied) as events:
                assert await events.next(1) is None
            assert engine.calls == []
            engine.paused = False  # as whoever paused it has it
            await until_applied(bus, 1)
    assert engine.calls[0] == "update"


async def test_an_engine_that_could_not_be_told_to_go_on_is_paused_until_it_can(bus: Bus, router_url: str) -> None:
    """Even one of others: the pause is ours."""
    topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1})
    async with serving(ScriptedEngine()) as engine:
        pool = {"policy": {"kind": "tiny", "concurrency": 8, "urls": [engine.url]}}
        topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1}, engines=pool)
        async with rollout_actor(bus, router_url, [], topology):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            engine.fails_to_continue = 5  # 3 tries after the update, 2 later
            await bus.publish(announcement(2))
            await until_applied(bus, 2)
            found = await changes(bus, 4)
    assert [(old, new) for old, new, _ in found] == [
        (EngineState.STARTING, EngineState.CURRENT),
        (EngineState.UPDATING, EngineState.PAUSED),
        (EngineState.PAUSED, EngineState.STARTING),
        (EngineState.STARTING, EngineState.CURRENT),
    ]
