"""Engines that are updated in groups: some always serve, and all end at the newest weights."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from actors.rollout.sglang.client import SglangClient
from messages import EngineState, EngineStateChanged
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed_groups, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

NUM_ENGINES = 3


@asynccontextmanager
async def engines_at_work(
    bus: Bus, router_url: str, router: str = "direct", **rollout: Any
) -> AsyncGenerator[list[ScriptedEngine]]:
    """Engines that hold the first weights and may be asked; each waits in its next update until it is let go on."""
    pool = {"kind": "tiny", "concurrency": 8, "num_engines": NUM_ENGINES, "update_groups": NUM_ENGINES}
    pool |= {"router": router}
    topology = topology_with(engines={"policy": pool}, rollout={"max_staleness": 1, **rollout})
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        engines = [await stack.enter_async_context(serving(ScriptedEngine())) for _ in range(NUM_ENGINES)]
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, engines, topology):
            await bus.publish(announcement(1))
            await until_admitted(bus)
            for engine in engines:
                engine.update_at = anyio.Event()
            yield engines
        group.cancel_scope.cancel()


async def until_admitted(bus: Bus) -> None:
    admitted: set[str] = set()
    async with bus.read(EngineStateChanged) as events:
        while len(admitted) < NUM_ENGINES:
            received = await events.next(15)
            assert received is not None
            if received.message.new is EngineState.CURRENT:
                admitted.add(received.message.engine)


def in_update(engines: list[ScriptedEngine]) -> list[int]:
    """Which of them take the second weights."""
    return [index for index, engine in enumerate(engines) if engine.calls.count("update") == 2 and engine.held == 1]


async def knows_all(router_url: str) -> bool:
    async with aiohttp.ClientSession() as session:
        return len(await SglangClient(session).workers(router_url)) == NUM_ENGINES


@pytest.mark.parametrize(
    ("mode", "router"),
    [*((mode, "direct") for mode in ("drain", "abort", "retract", "in_place")), ("drain", "sglang-router")],
)
async def test_others_serve_while_one_takes_weights_and_all_end_at_the_newest(
    bus: Bus, router_url: str, mode: str, router: str
) -> None:
    async with engines_at_work(bus, router_url, router, on_weight_update=mode) as engines:
        await bus.publish(announcement(2))
        updated: list[int] = []
        for number in range(NUM_ENGINES):
            await eventually(lambda: len(in_update(engines)) == 1)
            (index,) = in_update(engines)
            asked = len(engines[index].requests)
            await bus.publish(task(2 * number))
            await bus.publish(task(2 * number + 1))
            groups = await completed_groups(bus, 2 * number + 2)
            assert len(groups) == 2 * number + 2
            assert in_update(engines) == [index]
            assert len(engines[index].requests) == asked
            updated.append(index)
            at = engines[index].update_at
            assert at is not None
            at.set()
            await eventually(lambda engine=engines[index]: engine.held == 2)
        applied = await until_applied(bus, 2)
        assert sorted(updated) == list(range(NUM_ENGINES))
        assert [engine.held for engine in engines] == [2] * NUM_ENGINES
        assert applied.num_engines == NUM_ENGINES
        if router == "sglang-router":
            await eventually(lambda: knows_all(router_url))
        async with bus.read(EngineStateChanged) as events:
            told = [received.message.new async for received in events.so_far()]
        assert told == [EngineState.CURRENT] * NUM_ENGINES  # none was lost


async def test_one_that_refuses_weights_holds_up_no_other(bus: Bus, router_url: str) -> None:
    async with engines_at_work(bus, router_url) as engines:
        engines[0].refuses_weights = True
        await bus.publish(announcement(2))
        for engine in engines:
            assert engine.update_at is not None
            engine.update_at.set()
        await eventually(lambda: [engine.held for engine in engines[1:]] == [2, 2])
        await bus.publish(task(0))
        assert len(await completed_groups(bus, 1)) == 1
        engines[0].refuses_weights = False
        await eventually(lambda: engines[0].held == 2)
