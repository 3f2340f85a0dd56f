"""One request of a group goes ahead of the others, which then find the prompt in the engine's cache."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from actors.rollout.samples import group as module
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


class GatedEngine(ScriptedEngine):
    """An engine that begins no answer before its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.num_arrived = 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        if body["sampling_params"]["max_new_tokens"]:  # no probe
            self.num_arrived += 1
            await self.gate.wait()
        return await super()._generate(request)


@asynccontextmanager
async def grading(bus: Bus) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(grade, bus)
        yield
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("engine_keys", "num_before"),
    [({}, 1), ({"sglang": {"disable_radix_cache": True}}, 3), ({"kind": "tiny"}, 3)],
)
async def test_others_wait_for_the_first_token_if_the_engine_caches_prompts(
    bus: Bus, router_url: str, engine_keys: dict[str, Any], num_before: int
) -> None:
    policy = {"kind": "sglang", "concurrency": 8, **engine_keys}
    asked = topology_with(engines={"policy": policy}, rollout={"n_samples_per_prompt": 3})
    three = msgspec.structs.replace(task(0), num_samples=3)
    async with serving(GatedEngine()) as engine, rollout_actor(bus, router_url, [engine], asked), grading(bus):
        await bus.publish(announcement(1))
        await bus.publish(three)
        await eventually(lambda: engine.num_arrived == num_before)
        await anyio.sleep(0.2)  # others would come at once
        assert engine.num_arrived == num_before
        engine.gate.set()
        event = await completed(bus)
    assert len(event.samples) == engine.num_arrived == 3
    assert [bool(body.get("stream")) for body in engine.requests] == [num_before == 1, False, False]


async def test_others_do_not_wait_for_a_request_that_gets_no_token(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_S", 0.1)
    asked = topology_with(engines={"policy": {"kind": "sglang", "concurrency": 8}})
    async with serving(GatedEngine()) as engine, rollout_actor(bus, router_url, [engine], asked), grading(bus):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        await eventually(lambda: engine.num_arrived == 2)
        engine.gate.set()
        assert len((await completed(bus)).samples) == 2
