"""A real router, and a rollout actor connected to it, to scripted engines and to the bus."""

import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from actors.registry import hosted
from actors.rollout.actor import RolloutActor
from actors.rollout.samples.task_runner import ACK_WAIT_S
from messages import (
    GroupCompleted,
    Int32Array,
    Message,
    Prompt,
    RolloutRequested,
    SampleSummary,
    SamplingParams,
    Score,
    ScoreRequested,
    ScoresGiven,
    WeightProbe,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.node.supervisor.ports import free_port
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.support.scripted_engine import ScriptedEngine


@contextmanager
def running_router() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a real sglang-router; yield its process and URL."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.2", "--prometheus-port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(40)


PROBE = WeightProbe(token_ids=(3, 4, 5), log_probs=(0.0, -0.5, -0.5))  # matches the answers of a scripted engine


def announcement(version: int, *, step: int = 0, **fields: Any) -> WeightsAnnounced:
    told: dict[str, Any] = {"path": f"/weights/v{version}", "checksum": "sum", "size_bytes": 1, **fields}
    return WeightsAnnounced(version=version, step=step, incarnation=1, **told)


def task(
    group_id: int, *, attempt: int = 0, round: int = 0, carried: tuple[SampleSummary, ...] = ()
) -> RolloutRequested:
    prompt = Prompt(data="d", row=0, text="p", prompt_ids=Int32Array([7, 8]), label="1", rm_type="exact_match")
    return RolloutRequested(
        group_id=group_id,
        attempt=attempt,
        round=round,
        min_version=1,
        prompt=prompt,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=8),
        carried=carried,
    )


async def grade(bus: Bus, reward: float = 1.0, details: dict[str, Any] | None = None) -> None:
    """Run a reward worker that gives every sample the same reward."""
    async with bus.consume(ScoreRequested, durable="reward") as deliveries:
        async for delivery in deliveries:
            request = delivery.message
            scores = tuple(
                Score(index=item.index, part=item.part, reward=reward, details=details) for item in request.items
            )
            await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
            await delivery.ack()


@asynccontextmanager
async def rollout_actor(
    bus: Bus,
    router_url: str,
    engines: list[ScriptedEngine],
    topology: Topology,
    *,
    daemon: str = "",
    ack_wait_s: float = ACK_WAIT_S,
) -> AsyncGenerator[None]:
    """Run a rollout actor on some engines, as if a node daemon had started them."""

    def build(view: Bus) -> RolloutActor:
        return RolloutActor(topology, view, ack_wait_s=ack_wait_s)

    actor = msgspec.structs.replace(hosted("rollout", topology, Path()), build=build)
    for index, engine in enumerate(engines):
        await bus.kv.put(address_key("engine", "policy", index), Address(url=engine.url, agent=daemon))
    await bus.kv.put(address_key("router", "policy", 0), Address(url=router_url))
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [actor])
        try:
            yield
        finally:
            group.cancel_scope.cancel()


async def next_event(
    bus: Bus, *types: type[Message], from_seq: int = 1, timeout_s: float = 40.0
) -> tuple[Message, int]:
    """Return the first event of the given types from a log sequence on, and its sequence."""
    async with bus.read(*types, from_seq=from_seq) as events:
        received = await events.next(timeout_s)
        assert received is not None, f"no {[t.__name__ for t in types]} within {timeout_s} s"
        return received.message, received.seq


async def completed(bus: Bus) -> GroupCompleted:
    message, _ = await next_event(bus, GroupCompleted)
    assert isinstance(message, GroupCompleted)
    return message


async def until_applied(bus: Bus, version: int) -> WeightsApplied:
    """Wait until engines have verified a version; return the event."""
    async with bus.read(WeightsApplied) as events:
        while True:
            received = await events.next(40)
            assert received is not None, f"version {version} was not applied"
            if isinstance(received.message, WeightsApplied) and received.message.version == version:
                return received.message


async def completed_groups(bus: Bus, number: int) -> list[GroupCompleted]:
    """Return the first completed groups in the log."""
    async with bus.read(GroupCompleted) as events:
        received = [await events.next(40) for _ in range(number)]
    return [one.message for one in received if one is not None]
