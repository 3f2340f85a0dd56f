"""Weights of an evaluation that no engine holds any more and nobody can bring: it goes on with newer ones."""

from itertools import count

import anyio
import pytest

from messages import (
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    WeightsAnnounced,
    WeightsLost,
    WeightSyncAnswered,
    WeightSyncPrepared,
)
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.support.rollout import announcement, next_event, rollout_actor
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ISSUED = EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="s", num_items=1),))


def unwritten(version: int) -> WeightsAnnounced:
    """Weights that lie in no files, of a trainer that answers nobody."""
    return announcement(version, path="", transport="collective", sender="trainer")


async def takes_part(bus: Bus, version: int) -> None:
    """Begin weight syncs of a version, until the engine takes part in one."""
    with anyio.fail_after(200):
        for number in count():
            step = WeightSyncPrepared(session=f"{version}.{number}", incarnation=1, version=version, deadline_s=5.0)
            if (await bus.call("rollout", step, WeightSyncAnswered, timeout_s=40)).members:
                return
            await anyio.sleep(0.01)  # it is still on its way


async def test_engines_are_to_have_the_newest_and_to_keep_them_until_the_evaluation_ends(
    bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        for event in (unwritten(1), ISSUED, unwritten(2), unwritten(3)):
            await bus.publish(event)
        lost, _ = await next_event(bus, WeightsLost)
        assert lost == WeightsLost(version=1, newer=3, instance="rollout")
        await takes_part(bus, 3)


async def test_a_later_rollout_actor_finds_the_same_by_itself(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            for event in (unwritten(1), ISSUED, unwritten(2)):
                await bus.publish(event)
            _, seq = await next_event(bus, WeightsLost)
        await bus.publish(unwritten(3))
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            lost, _ = await next_event(bus, WeightsLost, from_seq=seq + 1)
            assert lost == WeightsLost(version=1, newer=3, instance="rollout")


async def test_weights_that_an_engine_waits_for_are_not_given_up_while_there_are_no_newer_ones(
    bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        for event in (unwritten(1), ISSUED):
            await bus.publish(event)
        await takes_part(bus, 1)
        await bus.publish(EvalEnded(incarnation=1, step=0, version=1, metrics={}))
        for event in (unwritten(2), unwritten(3)):
            await bus.publish(event)
        await takes_part(bus, 3)
        async with bus.read(WeightsLost) as events:
            assert await events.next(0.1) is None
