"""The typed bus against nats-py doing the same with the same messages, in one run. Prints rates and ratios as JSON.

Run: PYTHONPATH=. python tests/bench/bench_bus.py
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import nats
import numpy as np
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from messages import (
    Float32Array,
    GroupFailed,
    Int32Array,
    Plane,
    SampleKey,
    ScoreRequested,
    Segment,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
    decode,
    encode,
)
from messages.subjects import stream_of, subject_of
from runtime.bus import Bus, StreamLimits
from runtime.bus.server import running_server

pytestmark = pytest.mark.anyio
RUN = "bench"
NUM_SMALL = 4000
NUM_FETCHES = 1000
IN_FLIGHT = 64
NUM_REPEATS = 5


def event(number: int) -> GroupFailed:
    return GroupFailed(group_id=number, attempt=1, lease="lease", round=0, instance="rollout.0", reason="bench")


def task(name: str) -> ScoreRequested:
    return ScoreRequested(
        request_id=name, reply_to="_INBOX.x", group_id=1, attempt=1, rm_type="exact_match", deadline_s=0.0, items=()
    )


def payload(tokens: int = 64) -> SegmentsPublished:
    """A group of eight small samples."""
    rng = np.random.default_rng(1)
    segments = tuple(
        Segment(
            sample=SampleKey(group_id=1, attempt=1, index=index),
            prompt_ids=Int32Array(rng.integers(0, 1000, 16)),
            response_ids=Int32Array(rng.integers(0, 1000, tokens)),
            loss_mask=UInt8Array(np.ones(tokens, np.uint8)),
            rollout_log_probs=Float32Array(rng.normal(size=tokens).astype(np.float32)),
            weight_spans=(WeightSpan(version=1, start=0, end=tokens),),
        )
        for index in range(8)
    )
    return SegmentsPublished(group_id=1, attempt=1, lease="lease", segments=segments)


async def rate(count: int, work: Callable[[int], Awaitable[object]], in_flight: int) -> float:
    """How many per second, with so many under way."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    begun = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(in_flight):
            group.start_soon(worker)
    return count / (time.perf_counter() - begun)


class Bench:
    """The same work through the bus and through nats-py, on one server."""

    def __init__(self, bus: Bus, client: Client, js: JetStreamContext) -> None:
        self.bus, self.client, self.js = bus, client, js
        self.names = iter(range(10**9))

    async def bus_publish(self, in_flight: int, count: int) -> float:
        return await rate(count, lambda number: self.bus.publish(event(number)), in_flight)

    async def raw_publish(self, in_flight: int, count: int) -> float:
        async def publish(number: int) -> None:
            message = event(number)
            encoded = encode(message)
            await self.js.publish(subject_of(RUN, message), encoded.payload, headers=encoded.headers)

        return await rate(count, publish, in_flight)

    async def bus_read(self) -> float:
        begun, count = time.perf_counter(), 0
        async with self.bus.read(GroupFailed) as events:
            async for received in events:
                count += 1
                if not received.pending:
                    break
        return count / (time.perf_counter() - begun)

    async def raw_read(self) -> float:
        """A nats-py ordered consumer."""
        total = (await self.bus.state(Plane.EVENT)).messages
        done = asyncio.Event()
        count = 0

        async def on_message(message: Msg) -> None:
            nonlocal count
            decode(message.data, message.headers)
            count += 1
            if count == total:
                done.set()

        begun = time.perf_counter()
        subscription = await self.js.subscribe(
            "phy.bench.event.>", stream=stream_of(RUN, Plane.EVENT), ordered_consumer=True, cb=on_message
        )
        await done.wait()
        took_s = time.perf_counter() - begun
        await subscription.unsubscribe()
        return total / took_s

    async def fill_work(self) -> None:
        names = [str(next(self.names)) for _ in range(NUM_SMALL)]
        await rate(NUM_SMALL, lambda number: self.bus.publish(task(names[number])), IN_FLIGHT)

    async def bus_consume(self) -> float:
        await self.fill_work()
        begun = time.perf_counter()
        async with self.bus.consume(ScoreRequested, durable="bench", max_ack_pending=4096, prefetch=256) as deliveries:
            for _ in range(NUM_SMALL):
                delivery = await anext(deliveries)
                await delivery.ack()
        return NUM_SMALL / (time.perf_counter() - begun)

    async def raw_consume(self) -> float:
        await self.fill_work()
        begun, count = time.perf_counter(), 0
        subscription = await self.js.pull_subscribe(
            "phy.bench.work.score.>",
            durable="bench",
            stream=stream_of(RUN, Plane.WORK),
            config=ConsumerConfig(max_ack_pending=4096, filter_subject="phy.bench.work.score.>"),
        )
        while count < NUM_SMALL:
            for message in await subscription.fetch(256):
                decode(message.data, message.headers)
                await message.ack()
                count += 1
        took_s = time.perf_counter() - begun
        await subscription.unsubscribe()
        return NUM_SMALL / took_s

    async def bus_fetch(self, seq: int) -> float:
        return await rate(NUM_FETCHES, lambda _: self.bus.fetch(SegmentsPublished, seq), 16)

    async def raw_fetch(self, seq: int) -> float:
        stream = stream_of(RUN, Plane.DATA)

        async def fetch(_number: int) -> None:
            message = await self.js.get_msg(stream, seq=seq, direct=True)
            decode(message.data or b"", message.headers)

        return await rate(NUM_FETCHES, fetch, 16)


async def measure(url: str) -> dict[str, float]:
    client = await nats.connect(url)
    async with Bus.connect(url, RUN, name="bench") as bus:
        await bus.ensure_streams(StreamLimits())
        bench = Bench(bus, client, client.jetstream())
        seq = await bus.publish(payload())
        pairs = {
            "publish_one_by_one": (lambda: bench.bus_publish(1, 1000), lambda: bench.raw_publish(1, 1000)),
            f"publish_{IN_FLIGHT}_in_flight": (
                lambda: bench.bus_publish(IN_FLIGHT, NUM_SMALL),
                lambda: bench.raw_publish(IN_FLIGHT, NUM_SMALL),
            ),
            "read_log": (bench.bus_read, bench.raw_read),
            "consume_and_ack": (bench.bus_consume, bench.raw_consume),
            "fetch_group": (lambda: bench.bus_fetch(seq), lambda: bench.raw_fetch(seq)),
        }
        found: dict[str, float] = {}
        for name, (through_bus, bare) in pairs.items():
            rates = [(await through_bus(), await bare()) for _ in range(NUM_REPEATS)]  # in turn: same load
            ours, theirs = (max(side) for side in zip(*rates, strict=True))  # the least disturbed of each
            found |= {f"{name}_per_s": ours, f"{name}_nats_py_per_s": theirs, f"{name}_ratio": ours / theirs}
    await client.close()
    return {name: round(value, 2) for name, value in found.items()}


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with running_server(Path(directory)) as server:
            json.dump(await measure(server.url), sys.stdout, indent=2)
            print()


@pytest.mark.bench
@pytest.mark.timeout(300)
async def test_the_typed_bus_keeps_up_with_nats_py(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_server(tmp_path) as server:
        found = await measure(server.url)
    with capsys.disabled():
        print(json.dumps(found, indent=2))
    ratios = {name: value for name, value in found.items() if name.endswith("_ratio")}
    assert min(ratios.values()) > 0.6, ratios


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
