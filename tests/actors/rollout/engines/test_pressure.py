"""The samples that an engine may have: the decision, and the loop that follows the engines' reports."""

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from actors.rollout.engines import pressure
from actors.rollout.engines.pressure import Bounds, Pressure, next_limit, pressure_of
from actors.rollout.sglang.control_answers import Load, Queues
from messages import EngineLoad
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

BOUNDS = Bounds(8, 64)
EMPTY = Pressure()
BUSY = Pressure(num_running=32, usage=0.5)
CASES: dict[str, tuple[int, Pressure, Pressure, int]] = {
    "no pressure: a sixteenth more": (32, BUSY, EMPTY, 36),
    "no pressure, and the same report": (32, BUSY, BUSY, 36),
    "never above the most": (62, BUSY, EMPTY, 64),
    "little room in the cache": (32, BUSY._replace(usage=0.85), EMPTY, 32),
    "a request waits and the cache is full: 7/8 of those that run": (
        64,
        Pressure(num_running=40, num_waiting=1, usage=0.95),
        EMPTY,
        35,
    ),
    "many wait and the cache is full: as for one": (
        64,
        Pressure(num_running=40, num_waiting=24, usage=0.95),
        EMPTY,
        35,
    ),
    "a request was retracted": (64, Pressure(num_running=48, num_retracted=2, usage=0.7), EMPTY, 42),
    "fewer than 7/8 already": (20, Pressure(num_running=48, num_retracted=2, usage=0.7), EMPTY, 20),
    "never below the least": (10, Pressure(num_running=4, num_waiting=6, usage=0.99), EMPTY, 8),
    "the same report of retractions says nothing new": (
        64,
        Pressure(num_running=48, num_retracted=2, usage=0.7),
        Pressure(num_running=48, num_retracted=2, usage=0.7),
        64,
    ),
    "an empty engine that repeats an old report": (32, Pressure(num_retracted=2), Pressure(num_retracted=2), 36),
    "a queue that is new: prefills pass": (64, Pressure(num_running=32, num_waiting=20, usage=0.3), BUSY, 64),
    "a queue that was there before: a quarter of it less": (
        64,
        Pressure(num_running=32, num_waiting=20, usage=0.3),
        Pressure(num_running=32, num_waiting=9, usage=0.3),
        61,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_next_limit_of_an_engine(case: str) -> None:
    limit, now, before, expected = CASES[case]
    assert next_limit(limit, now, before, BOUNDS) == expected


counts = st.integers(0, 200)
pressures = st.builds(Pressure, counts, counts, counts, st.floats(0, 1))
bounds = st.tuples(st.integers(1, 300), st.integers(0, 300)).map(lambda pair: Bounds(pair[0], pair[0] + pair[1]))


@given(counts, pressures, pressures, bounds)
def test_a_limit_stays_within_its_bounds_and_pressure_never_raises_it(
    limit: int, now: Pressure, before: Pressure, bounds: Bounds
) -> None:
    limit = max(bounds.least, min(bounds.most, limit))
    found = next_limit(limit, now, before, bounds)
    assert bounds.least <= found <= bounds.most
    if now.num_running and (now.num_waiting or now.num_retracted):
        assert found <= limit


@given(pressures, bounds)
def test_without_pressure_an_engine_gets_the_most_in_a_bounded_time(pressed: Pressure, bounds: Bounds) -> None:
    limit = next_limit(bounds.most, pressed, EMPTY, bounds)
    for _ in range(2 * pressure.STEPS_TO_MOST):
        limit = next_limit(limit, BUSY, BUSY, bounds)
    assert limit == bounds.most


def test_an_engine_with_several_schedulers_counts_them_all() -> None:
    first = Load(num_running_reqs=3, num_waiting_reqs=1, num_used_tokens=10, token_usage=0.2)
    second = Load(num_running_reqs=4, token_usage=0.7, queues=Queues(retracted=5))
    assert pressure_of([first, second]) == Pressure(7, 1, 5, 0.7)


def report(**fields: Any) -> dict[str, Any]:
    return {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.1} | fields


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "fewer than none": {"num_waiting_reqs": -3, "token_usage": 0.99},
    "more than any": {"num_running_reqs": 10**12},
    "more than the cache": {"token_usage": 1.5},
    "as a text": {"token_usage": "0.99"},
    "retracted": {"queues": {"retracted": -1}},
}


async def running(bus: Bus, engines: Sequence[ScriptedEngine], number: int) -> None:
    """Groups of two samples, until so many requests run."""
    await bus.publish(announcement(1))
    await until_applied(bus, 1)
    for group_id in range(8):
        await bus.publish(task(group_id))
    await eventually(lambda: sum(len(engine.requests) for engine in engines) >= number)


@pytest.mark.anyio
async def test_an_engine_under_pressure_gets_fewer_samples_and_then_more(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "EVERY_S", 0.02)
    engine = ScriptedEngine(hold=True, load=report())
    pool = {"kind": "tiny", "concurrency": 8, "min_concurrency": 2, "router": "direct"}
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, "http://127.0.0.1:1", [engine], topology_with(engines={"policy": pool})):
            await running(bus, [engine], 8)
            engine.load = report(num_waiting_reqs=2, token_usage=0.99)
            looks = engine.num_loads
            await eventually(lambda: engine.num_loads > looks + 1)  # 8 run, and from now on there may be 3
            for number in range(1, 6):
                engine.release_one()
                await eventually(lambda number=number: engine.num_answered == number)
            looks = engine.num_loads
            await eventually(lambda: engine.num_loads > looks + 1)
            assert len(engine.requests) == 8
            engine.load = report()
            await eventually(lambda: len(engine.requests) == 13)
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_completed_group_says_the_load_of_its_last_engine(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "EVERY_S", 0.02)
    engine = ScriptedEngine(load=report(num_waiting_reqs=2, token_usage=0.5))
    pool = {"kind": "tiny", "concurrency": 8, "min_concurrency": 2, "router": "direct"}
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, "http://127.0.0.1:1", [engine], topology_with(engines={"policy": pool})):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await eventually(lambda: engine.num_loads > 1)
            await bus.publish(task(0))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert event.last_sample.load == EngineLoad(running=4, waiting=2, cache_usage=0.5)


@pytest.mark.anyio
@pytest.mark.parametrize("least", [2, 6])
async def test_only_engines_that_accept_requests_have_slots(bus: Bus, least: int) -> None:
    first, second = ScriptedEngine(hold=True), ScriptedEngine(hold=True)
    pool = {"kind": "tiny", "concurrency": 6, "min_concurrency": least, "num_engines": 3, "router": "direct"}
    async with (
        serving(first),
        serving(second),
        rollout_actor(bus, "http://127.0.0.1:1", [first], topology_with(engines={"policy": pool})),
    ):
        await running(bus, [first], 6)
        await anyio.wait_all_tasks_blocked()
        await bus.kv.put(address_key("engine", "policy", 1), Address(url=second.url))
        await eventually(lambda: len(second.requests) >= 6)
        assert [len(first.requests), len(second.requests)] == [6, 6]


@pytest.mark.anyio
async def test_tasks_of_new_weights_do_not_crowd_on_the_engine_that_is_updated_first(bus: Bus) -> None:
    first, second = ScriptedEngine(hold=True), ScriptedEngine(hold=True)
    pool = {"kind": "tiny", "concurrency": 6, "num_engines": 2, "router": "direct", "update_groups": 2}
    async with (
        serving(first),
        serving(second),
        rollout_actor(bus, "http://127.0.0.1:1", [first, second], topology_with(engines={"policy": pool})),
    ):
        await bus.publish(announcement(1))
        await until_applied(bus, 1)
        await eventually(lambda: "continue" in first.calls and "continue" in second.calls)
        for engine in (first, second):
            engine.update_at, engine.calls = asyncio.Event(), []
        await bus.publish(announcement(2))
        await eventually(lambda: "update" in first.calls or "update" in second.calls)
        early, late = (first, second) if "update" in first.calls else (second, first)
        assert early.update_at is not None
        assert late.update_at is not None
        for group_id in range(8):
            await bus.publish(msgspec.structs.replace(task(group_id), min_version=2))
        early.update_at.set()
        await early.wait_for_requests(6)
        await eventually(lambda: "update" in late.calls)
        await anyio.wait_all_tasks_blocked()
        assert [len(early.requests), len(late.requests)] == [6, 0]
        late.update_at.set()
        await late.wait_for_requests(6)
        assert [len(early.requests), len(late.requests)] == [6, 6]


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ["refused", "late", *IMPOSSIBLE])
async def test_an_engine_that_does_not_report_keeps_its_number_and_is_named_once(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(pressure, "EVERY_S", 0.02)
    monkeypatch.setattr(pressure, "TIMEOUT_S", 0.05 if answer == "late" else 40.0)
    asked: list[float] = []

    async def silent(request: web.Request) -> web.Response:
        asked.append(anyio.current_time())
        if answer == "late":
            await anyio.sleep(5)
        if answer in IMPOSSIBLE:
            return web.json_response({"loads": [report(), report() | IMPOSSIBLE[answer]]})
        raise web.HTTPNotFound

    engine = ScriptedEngine(hold=True, answer_loads=silent)
    pool = {"kind": "tiny", "concurrency": 6, "min_concurrency": 2, "router": "direct"}
    with capture_logs() as logged:
        async with (
            serving(engine),
            rollout_actor(bus, "http://127.0.0.1:1", [engine], topology_with(engines={"policy": pool})),
        ):
            await running(bus, [engine], 6)
            number = len(asked)
            await eventually(lambda: len(asked) >= number + 3)
            engine.release_one()
            await engine.wait_for_requests(7)
    [named] = [entry for entry in logged if entry["event"] == "engine_load_not_reported"]
    assert named["engine"] == "engine.policy.0"
    assert not (wrong := IMPOSSIBLE.get(answer)) or next(iter(wrong)) in named["reason"]
