"""Direct dispatch: which engine gets a request, and which one gets its abort."""

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.processes import process_specs
from actors.rollout.engines.dispatch import FEW, choose_engine
from messages import GroupAborted, RolloutRequested, RoundHalted, SamplingParams
from runtime.bus.bus import Bus
from runtime.settings.topology import SOLE_NODE, Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import (
    announcement,
    completed_groups,
    grade,
    next_event,
    rollout_actor,
    task,
    until_applied,
)
from tests.support.scripted_engine import ScriptedEngine, serving

NO_ROUTER = "http://127.0.0.1:1"  # nothing listens there


@pytest.mark.parametrize(
    ("loads", "before", "chosen"),
    [
        ({"a": 5, "b": 3, "c": 4}, None, "b"),  # the least loaded one
        ({"a": 30, "b": 20, "c": 10}, "a", "a"),  # 1.5 of the mean load, 20: its prompts stay
        ({"a": 31, "b": 20, "c": 9}, "a", "c"),  # more
        ({"a": FEW, "b": 0}, "a", "a"),  # few samples are no imbalance
        ({"a": FEW + 1, "b": 0}, "a", "b"),
        ({"a": 100}, "a", "a"),  # the only one
        ({"a": 4, "b": 9}, "gone", "a"),
    ],
)
def test_the_engine_of_a_request_by_hand(loads: dict[str, int], before: str | None, chosen: str) -> None:
    assert choose_engine(loads, before, 0) == chosen


def test_a_prompt_leaves_an_engine_that_has_the_most_samples() -> None:
    assert choose_engine({"a": 7, "b": 6}, "a", 0, most=8) == "a"
    assert choose_engine({"a": 8, "b": 6}, "a", 0, most=8) == "b"
    assert choose_engine({"a": 8, "b": 8}, "a", 1, most=8) == "b"  # all are full, by evaluations


def test_equally_loaded_engines_are_taken_in_turn() -> None:
    loads = {"a": 2, "b": 2, "c": 3}
    assert [choose_engine(loads, None, turn) for turn in range(4)] == ["a", "b", "a", "b"]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=400),
    st.integers(1, 8),
)
def test_no_engine_gets_a_request_while_it_has_more_than_one_and_a_half_of_the_mean(
    requests: list[tuple[int, int]], num_engines: int
) -> None:
    """Requests of prompts, each of which ends after so many others came."""
    loads = {f"e{index}": 0 for index in range(num_engines)}
    of_prompt: dict[int, str] = {}
    ends: list[tuple[int, str]] = []
    for now, (prompt, lasts) in enumerate(requests):
        for _, name in [end for end in ends if end[0] <= now]:
            loads[name] -= 1
        ends = [end for end in ends if end[0] > now]
        name = of_prompt[prompt] = choose_engine(loads, of_prompt.get(prompt), now)
        mean = sum(loads.values()) / num_engines
        assert loads[name] <= max(FEW, 1.5 * mean)
        loads[name] += 1
        ends.append((now + lasts, name))


def direct(**fields: Any) -> Topology:
    pool = {"kind": "tiny", "concurrency": 64, "num_engines": 2, "router": "direct", **fields}
    return topology_with(engines={"policy": pool})


def test_a_router_is_started_only_for_its_own_dispatch() -> None:
    external = direct(router="sglang-router", router_url="http://10.0.0.5:30000")
    for topology, has_router in ((direct(), False), (direct(router="sglang-router"), True), (external, False)):
        names = [spec.name for spec in process_specs(topology, SOLE_NODE, Path("runs/r"))]
        assert ("router.policy" in names) == has_router
        assert "engine.policy.1" in names


def long_task(group_id: int, num_samples: int) -> RolloutRequested:
    sampling = SamplingParams(max_new_tokens=300)
    return msgspec.structs.replace(task(group_id), sampling=sampling, num_samples=num_samples)


@pytest.mark.anyio
@pytest.mark.parametrize("length", [8, 300], ids=["whole", "streamed"])
async def test_an_answer_with_a_prefix_of_older_weights_is_sent_again_once(bus: Bus, length: int) -> None:
    """Its request waited at the engine during an update in place, which keeps cached prefixes."""
    engine = ScriptedEngine(hold=True, script=lambda *_: [1, 2])  # streams nothing before it is released
    topology = topology_with(
        engines={"policy": {"kind": "tiny", "concurrency": 8}},
        rollout={"on_weight_update": "in_place", "max_staleness": 1},
    )
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, NO_ROUTER, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(0), sampling=SamplingParams(max_new_tokens=length)))
            await engine.wait_for_requests(2)
            engine.update_at = anyio.Event()
            await bus.publish(announcement(2))
            await eventually(lambda: engine.calls[-2:] == ["in_place", "update"])
            engine.update_at.set()
            await eventually(lambda: engine.held == 2)
            engine.release()  # sampled by the new weights from the first token on
            (event,) = await completed_groups(bus, 1)
        group.cancel_scope.cancel()
    assert [body["extra_key"] for body in engine.requests] == ["weights 1"] * 2 + ["weights 2"] * 2
    assert len(event.samples) == 2


@pytest.mark.anyio
async def test_requests_behind_a_router_have_the_key_of_their_conversation(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], direct(num_engines=1, router="sglang-router")):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await completed_groups(bus, 1)
        group.cancel_scope.cancel()
    samples = {body["rid"].rsplit("-", 2)[0] for body in engine.requests}
    assert len(samples) == 2
    assert set(engine.routing_keys) == samples


def held_by(engine: ScriptedEngine) -> Counter[str]:
    """Requests that an engine got, by lease."""
    return Counter(body["rid"].partition("-")[0] for body in engine.requests)


@pytest.mark.anyio
async def test_prompts_are_spread_over_the_engines_and_each_stays_on_one(bus: Bus) -> None:
    engines = [ScriptedEngine(hold=True) for _ in range(2)]
    async with serving(engines[0]), serving(engines[1]), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, NO_ROUTER, engines, direct()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await eventually(lambda: all(engine.updates for engine in engines))
            for group_id in range(4):
                await bus.publish(long_task(group_id, 4))
            await eventually(lambda: sum(engine.streams for engine in engines) == 16)
            for engine in engines:
                engine.release()
            completed = await completed_groups(bus, 4)
        group.cancel_scope.cancel()
    assert [len(event.samples) for event in completed] == [4] * 4
    by_lease = [held_by(engine) for engine in engines]
    assert set(by_lease[0]).isdisjoint(by_lease[1]), "all samples of a prompt are on one engine"
    assert [sorted(counts.values()) for counts in by_lease] == [[4, 4], [4, 4]]
    for body in engines[0].requests:
        assert body["extra_key"] == "weights 1"
        assert body["sampling_params"]["spaces_between_special_tokens"] is False


@pytest.mark.anyio
async def test_a_halt_aborts_each_request_at_its_own_engine_with_one_call_each_if_it_has_no_others(bus: Bus) -> None:
    engines = [ScriptedEngine(hold=True) for _ in range(2)]
    async with serving(engines[0]), serving(engines[1]):
        async with rollout_actor(bus, NO_ROUTER, engines, direct()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await eventually(lambda: all(engine.updates for engine in engines))
            await bus.publish(long_task(0, 3))
            await eventually(lambda: sum(engine.streams for engine in engines) == 3)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
    assert isinstance(aborted, GroupAborted)
    busy, idle = sorted(engines, key=lambda engine: -len(engine.requests))
    assert (len(busy.requests), len(idle.requests)) == (3, 0)
    assert (busy.aborts, idle.aborts) == ([{"abort_all": True}], [])


@pytest.mark.anyio
async def test_a_request_whose_stream_broke_goes_on_at_another_engine_from_its_tokens(bus: Bus) -> None:
    """The first engine accepts requests and breaks each stream: the request that goes on must not return to it."""
    engines = [ScriptedEngine(hold=True, incremental=True) for _ in range(2)]
    async with serving(engines[0]), serving(engines[1]), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, NO_ROUTER, engines, direct()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await eventually(lambda: all(engine.updates for engine in engines))
            await bus.publish(long_task(0, 1))
            await eventually(lambda: sum(engine.streams for engine in engines) == 1)
            first, second = sorted(engines, key=lambda engine: -len(engine.requests))
            for _ in range(20):  # the reader gets the tokens: steps of the loop, however long each of them takes
                await anyio.sleep(0.01)
            first.break_connections()
            second.release()
            (event,) = await completed_groups(bus, 1)
        group.cancel_scope.cancel()
    assert event.attempt == 0
    assert [body["input_ids"] for body in first.requests] == [[7, 8]]
    assert [body["input_ids"] for body in second.requests] == [[7, 8, 1, 2]]
