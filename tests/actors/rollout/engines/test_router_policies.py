"""The real sglang-router with each policy, as a run starts it and one that already ran; engines are scripted."""

import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from actors.processes import process_specs
from actors.rollout.engines.router import ThroughRouter
from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.reading import AnswerReader
from messages import StatsGiven, StatsRequested
from runtime.bus.bus import Bus
from runtime.node.supervisor.ports import free_port
from runtime.settings.processes import with_address
from runtime.settings.topology import SOLE_NODE, Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.tiny_engine import wait_until_200

pytestmark = [pytest.mark.anyio]

NUM_ENGINES = 3


def routed(**fields: Any) -> Topology:
    pool = {"kind": "tiny", "concurrency": 8, "num_engines": NUM_ENGINES, "router": "sglang-router", **fields}
    return topology_with(engines={"policy": pool})


@contextmanager
def running(topology: Topology) -> Iterator[str]:
    """The router that a run starts; its URL."""
    (spec,) = [spec for spec in process_specs(topology, SOLE_NODE, Path("runs/r")) if spec.name == "router.policy"]
    port = free_port()
    command = [with_address(part, "127.0.0.1", port) for part in spec.command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_200(f"http://127.0.0.1:{port}/liveness", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def send(client: SglangClient, router: str, key: str, number: int) -> None:
    body = {"rid": f"r-{number}", "input_ids": [7, 8], "sampling_params": {"max_new_tokens": 4}}
    reader = AnswerReader(SampleBuffer())
    await client.generate(router, body, [reader], routing_key=key)
    assert reader.ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", ["random", "cache_aware", "power_of_two", "manual"])  # and round_robin elsewhere
async def test_a_router_with_each_policy_starts_without_engines_and_passes_requests_on(policy: str) -> None:
    """With "manual", requests of a conversation reach one engine; conversations are spread at random."""
    with running(routed(router_policy=policy)) as router:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(serving(ScriptedEngine())) for _ in range(NUM_ENGINES)]
            client = SglangClient(await stack.enter_async_context(aiohttp.ClientSession()))
            workers = ThroughRouter(client)

            async def knows(engine: ScriptedEngine) -> bool:
                return await workers.has(router, engine.url)

            for engine in engines:
                await eventually(lambda engine=engine: knows(engine))
            for number in range(24):
                await send(client, router, f"conversation {number % 8}", number)
            held = [{body["rid"] for body in engine.requests} for engine in engines]
    assert sum(len(rids) for rids in held) == 24
    if policy == "manual":
        found = [{int(rid.removeprefix("r-")) % 8 for rid in rids} for rids in held]
        assert sum(len(conversations) for conversations in found) == 8, "each is on one engine"


async def test_an_external_router_serves_a_run_alone(bus: Bus, router_url: str) -> None:
    """Engines of others that it lists stay there; those that an earlier start of the run has left are removed."""

    async def waits_for() -> str:
        return (await bus.call("rollout", StatsRequested(), StatsGiven, timeout_s=5)).waits_for

    async def waits_for_others() -> bool:
        return "lists engines of others: " in await waits_for()

    async def listed(client: SglangClient) -> set[str]:
        return {worker.url for worker in await client.workers(router_url)}

    topology = routed(num_engines=1, router_url=router_url)
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        foreign, left, own = [await stack.enter_async_context(serving(ScriptedEngine())) for _ in range(3)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        others, ours = SglangClient(session, run="other"), SglangClient(session, run=topology.run.name)
        await others.add_worker(router_url, foreign.url)
        await ours.add_worker(router_url, left.url)

        async def lists(*engines: ScriptedEngine) -> bool:
            return await listed(ours) == {engine.url for engine in engines}

        await eventually(lambda: lists(foreign, left))
        group.start_soon(grade, bus)
        async with rollout_actor(bus, "http://127.0.0.1:9", [own], topology):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await eventually(waits_for_others)
            assert await lists(foreign, left)
            (stranger,) = [worker for worker in await others.workers(router_url) if worker.url == foreign.url]
            await others.remove_worker(router_url, stranger)
            await until_applied(bus, 1)
            await completed(bus)
            assert await lists(own)
            assert not foreign.requests
            assert not left.requests
            assert len(own.requests) == 2
        group.cancel_scope.cancel()
