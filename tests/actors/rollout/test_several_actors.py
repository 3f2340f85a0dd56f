"""Several rollout actors of one run: each drives its own engines, and together they do all tasks once."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.registry import hosted
from actors.rollout import actor as rollout
from actors.rollout.engines import others
from actors.rollout.engines.others import OtherActors, Served
from actors.rollout.engines.target import TargetWeights
from messages import (
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    WeightsApplied,
    WeightsLost,
    WeightsRefused,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.support.rollout import PROBE, announcement, completed_groups, grade, next_event, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


def of_two(**engines: Any) -> Topology:
    pool = {"kind": "tiny", "concurrency": 8, "num_engines": 2, **engines}
    return topology_with(engines={"policy": pool}, rollout={"nodes": ["local", "local"]})


async def place(bus: Bus, index: int, engine: ScriptedEngine) -> None:
    await bus.kv.put(address_key("engine", "policy", index), Address(url=engine.url))


@asynccontextmanager
async def two_actors(bus: Bus, topology: Topology, engines: Sequence[ScriptedEngine]) -> AsyncGenerator[None]:
    """Run two rollout actors, which find these engines, and a reward worker."""
    for index, engine in enumerate(engines):
        await place(bus, index, engine)
    actors = [hosted("rollout", topology, Path(), name=f"rollout.{index}") for index in range(2)]
    async with anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        group.start_soon(host, bus, actors)
        yield
        group.cancel_scope.cancel()


async def applied_by(bus: Bus, number: int) -> set[str]:
    """Return the actors of the first events that engines hold weights."""
    async with bus.read(WeightsApplied) as events:
        found = [await events.next(40) for _ in range(number)]
    return {event.message.instance for event in found if event is not None}


async def test_each_actor_updates_its_own_engine_alone_and_both_take_tasks(bus: Bus) -> None:
    async with serving(ScriptedEngine(hold=True)) as first, serving(ScriptedEngine(hold=True)) as second:
        async with two_actors(bus, of_two(), [first, second]):
            await bus.publish(announcement(1))
            assert await applied_by(bus, 2) == {"rollout.0", "rollout.1"}
            for group_id in range(8):
                await bus.publish(task(group_id))
            await first.wait_for_requests(8)
            await second.wait_for_requests(8)
            for engine in (first, second):
                engine.release()
            events = await completed_groups(bus, 8)
    assert first.updates == second.updates == ["/weights/v1"]
    assert sorted(event.group_id for event in events) == list(range(8))
    assert [sum(event.instance == name for event in events) for name in ("rollout.0", "rollout.1")] == [4, 4]


async def test_an_actor_whose_engine_is_not_up_takes_no_task(bus: Bus) -> None:
    """Its engine may load for minutes: the others do all groups meanwhile."""
    async with serving(ScriptedEngine()) as first, serving(ScriptedEngine()) as late:
        async with two_actors(bus, of_two(), [first]):
            await bus.publish(announcement(1))
            for group_id in range(12):
                await bus.publish(task(group_id))
            events = await completed_groups(bus, 12)
            assert {event.instance for event in events} == {"rollout.0"}
            await place(bus, 1, late)
            await applied_by(bus, 2)
            first.hold = True
            for group_id in range(12, 17):
                await bus.publish(task(group_id))
            await late.wait_for_requests(1)
            first.release()
            assert len(await completed_groups(bus, 17)) == 17


async def test_tasks_of_an_actor_that_lost_its_engine_go_to_another_one_with_their_tokens(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "HANDOVER_S", 0.2)
    async with serving(ScriptedEngine(hold=True)) as first:
        async with two_actors(bus, of_two(), [first]):
            async with serving(ScriptedEngine(hold=True)) as second:
                await place(bus, 1, second)
                await bus.publish(announcement(1))
                await applied_by(bus, 2)
                for group_id in range(8):
                    await bus.publish(task(group_id))
                await first.wait_for_requests(8)
                await second.wait_for_requests(8)
                second.break_connections()
            first.release()
            events = await completed_groups(bus, 8)
    assert {event.instance for event in events} == {"rollout.0"}
    assert sorted(event.group_id for event in events) == list(range(8))


async def test_an_engine_is_compared_with_those_of_other_actors(bus: Bus) -> None:
    async with serving(ScriptedEngine()) as first, serving(ScriptedEngine(checksum="another")) as second:
        async with two_actors(bus, of_two(verify="always"), [first]):
            await bus.publish(announcement(1, probe=PROBE))
            await applied_by(bus, 1)
            await place(bus, 1, second)
            refused, _ = await next_event(bus, WeightsRefused)
    assert isinstance(refused, WeightsRefused)
    assert refused.engine == "engine.policy.1"
    assert "that of engine.policy.0 is sum for the same files" in refused.reason


async def test_what_other_actors_serve_counts_until_it_expires(bus: Bus) -> None:
    first, second = (OtherActors(bus.kv, "policy", f"rollout.{index}", is_alone=False) for index in range(2))
    alone = OtherActors(bus.kv, "policy", "rollout", is_alone=True)
    assert not await first.hold(1)
    await bus.kv.put("served.policy.rollout.0", Served(version=3, answers=True))
    assert [await each.hold(3) for each in (first, second, alone)] == [False, True, False]
    assert [await each.answer() for each in (first, second, alone)] == [False, True, False]
    assert not await second.hold(4)
    await bus.kv.put("served.policy.rollout.0", Served())
    assert not await second.hold(1)
    assert others.LIFETIME_S > 2 * others.RENEW_EVERY_S


def test_all_actors_leave_lost_weights_where_the_log_says_so() -> None:
    """Each folds the same events, in the log's order, whichever of them reported the loss first."""
    sets = (EvalSetSize(set="s", num_items=1),)
    log = [
        announcement(1),
        EvalIssued(incarnation=1, step=0, version=1, sets=sets),
        announcement(2),
        announcement(3),
        WeightsLost(version=1, newer=2, instance="rollout.0"),
        WeightsLost(version=1, newer=3, instance="rollout.1"),
        EvalEnded(incarnation=1, step=0, version=1, metrics={}),
    ]
    versions = list[int]()
    target = TargetWeights()
    for event in log:
        target.fold(event)
        assert target.newest is not None
        versions.append(target.newest.version)
    assert versions == [1, 1, 1, 1, 2, 2, 3]


def test_checksums_are_not_sent_by_the_only_rollout_actor() -> None:
    event = WeightsApplied(version=1, instance="rollout", num_engines=1, took_s=0.0)
    assert b"checksums" not in msgspec.json.encode(event)


async def test_a_resumed_group_goes_to_the_actor_that_has_its_prefix_and_to_another_if_that_is_gone(bus: Bus) -> None:
    async with serving(ScriptedEngine()) as first, serving(ScriptedEngine()) as second:
        async with two_actors(bus, of_two(), [first, second]):
            await bus.publish(announcement(1))
            await applied_by(bus, 2)
            names = [f"rollout.{number % 2}" for number in range(12)]
            for group_id, name in enumerate(names):
                await bus.publish(msgspec.structs.replace(task(group_id), prefers=name))
                await completed_groups(bus, group_id + 1)
            for group_id in (12, 13):
                await bus.publish(msgspec.structs.replace(task(group_id), prefers="rollout.7"))
            events = await completed_groups(bus, 14)
    by_group = {event.group_id: event.instance for event in events}
    assert len(by_group) == 14
    right = sum(by_group[group_id] == name for group_id, name in enumerate(names))
    assert right >= len(names) - 2  # a pass may meet an actor that has not asked for its next task yet
