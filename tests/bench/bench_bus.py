"""The typed bus against nats-py doing the same with the same messages, in one run. Prints rates and ratios as JSON.

With --sync: publishing to a server with `bus.sync = "always"` against one with "interval", on the disk of DIR.

Run: python -m tests.bench.bench_bus [--sync DIR]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import nats
import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg
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
from runtime.bus.bus import Bus
from runtime.bus.limits import StreamLimits
from runtime.bus.nats.server import SYNC_INTERVAL, ServerSettings
from runtime.process.logs import configure_logging
from tests.support.running_server import running_server

RUN = "bench"
IN_FLIGHT = 64


def event(number: int) -> GroupFailed:
    return GroupFailed(group_id=number, attempt=1, lease="lease", round=0, instance="rollout.0", reason="bench")


def task(name: str) -> ScoreRequested:
    return ScoreRequested(request_id=name, reply_to="_INBOX.x", group_id=1, attempt=1, rm_type="exact_match", items=())


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

    def __init__(self, bus: Bus, client: Client, num_messages: int) -> None:
        self.bus, self.client, self.js = bus, client, client.jetstream()
        self.num_messages = num_messages
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
        names = [str(next(self.names)) for _ in range(self.num_messages)]
        await rate(self.num_messages, lambda number: self.bus.publish(task(names[number])), IN_FLIGHT)

    async def bus_consume(self) -> float:
        await self.fill_work()
        begun = time.perf_counter()
        async with self.bus.consume(ScoreRequested, durable="bench", max_ack_pending=4096, prefetch=256) as deliveries:
            for _ in range(self.num_messages):
                delivery = await anext(deliveries)
                await delivery.ack()
        return self.num_messages / (time.perf_counter() - begun)

    async def raw_consume(self) -> float:
        await self.fill_work()
        begun, count = time.perf_counter(), 0
        subscription = await self.js.pull_subscribe(
            "phy.bench.work.score.>",
            durable="bench",
            stream=stream_of(RUN, Plane.WORK),
            config=ConsumerConfig(max_ack_pending=4096, filter_subject="phy.bench.work.score.>"),
        )
        while count < self.num_messages:
            for message in await subscription.fetch(256):
                decode(message.data, message.headers)
                await message.ack()
                count += 1
        took_s = time.perf_counter() - begun
        await subscription.unsubscribe()
        return self.num_messages / took_s

    async def bus_fetch(self, seq: int) -> float:
        return await rate(self.num_messages // 4, lambda _: self.bus.fetch(SegmentsPublished, seq), 16)

    async def raw_fetch(self, seq: int) -> float:
        stream = stream_of(RUN, Plane.DATA)

        async def fetch(_number: int) -> None:
            message = await self.js.get_msg(stream, seq=seq, direct=True)
            decode(message.data or b"", message.headers)

        return await rate(self.num_messages // 4, fetch, 16)


async def measure(num_messages: int, num_repeats: int) -> dict[str, float]:
    """Rates of both, and their ratios: medians over repeats taken in turn, so that both meet the same load."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            running_server(Path(directory)) as server,
            await nats.connect(server.url) as client,
            Bus.connect(server.url, RUN, name="bench") as bus,
        ):
            await bus.ensure_streams(StreamLimits())
            return await compare(Bench(bus, client, num_messages), num_repeats)


async def compare(bench: Bench, num_repeats: int) -> dict[str, float]:
    seq = await bench.bus.publish(payload())
    few, many = bench.num_messages // 4, bench.num_messages
    pairs = {
        "publish_one_by_one": (lambda: bench.bus_publish(1, few), lambda: bench.raw_publish(1, few)),
        f"publish_{IN_FLIGHT}_in_flight": (
            lambda: bench.bus_publish(IN_FLIGHT, many),
            lambda: bench.raw_publish(IN_FLIGHT, many),
        ),
        "read_log": (bench.bus_read, bench.raw_read),
        "consume_and_ack": (bench.bus_consume, bench.raw_consume),
        "fetch_group": (lambda: bench.bus_fetch(seq), lambda: bench.raw_fetch(seq)),
    }
    found: dict[str, float] = {}
    for name, (through_bus, bare) in pairs.items():
        rates = [(await through_bus(), await bare()) for _ in range(num_repeats)]
        ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
        found |= {f"{name}_per_s": ours, f"{name}_nats_py_per_s": theirs, f"{name}_ratio": ours / theirs}
    return {name: round(value, 2) for name, value in found.items()}


async def sync_cost(place: Path, num_messages: int, num_repeats: int) -> dict[str, float]:
    """Messages a second under both values of `bus.sync`, and their ratio: medians over repeats taken in turn."""
    found: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        buses: dict[str, Bus] = {}
        for name, sync_interval in (("interval", SYNC_INTERVAL), ("always", "always")):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            settings = ServerSettings(store_dir=directory / "store", sync_interval=sync_interval)
            server = await stack.enter_async_context(running_server(directory, settings))
            buses[name] = await stack.enter_async_context(Bus.connect(server.url, RUN, name="bench"))
            await buses[name].ensure_streams(StreamLimits())
        for what, make, in_flight in (
            ("event", event, 1),
            ("event_64_in_flight", event, IN_FLIGHT),
            ("group", lambda _: payload(1024), 1),
            ("group_64_in_flight", lambda _: payload(1024), IN_FLIGHT),
        ):
            rates: dict[str, list[float]] = {name: [] for name in buses}
            for _ in range(num_repeats):
                for name, bus in buses.items():
                    rates[name].append(
                        await rate(num_messages, lambda number, b=bus, m=make: b.publish(m(number)), in_flight)
                    )
            for name, each in rates.items():
                found[f"{what}_{name}_per_s"] = statistics.median(each)
            found[f"{what}_ratio"] = found[f"{what}_always_per_s"] / found[f"{what}_interval_per_s"]
    return {name: round(value, 2) for name, value in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=4000, help="per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sync", metavar="DIR", type=Path, help="measure bus.sync on the disk of this directory")
    args = parser.parse_args(argv)
    configure_logging("bench", RUN)
    if args.sync is not None:
        found = anyio.run(sync_cost, args.sync, args.messages // 10, args.repeats)
    else:
        found = anyio.run(measure, args.messages, args.repeats, backend_options={"use_uvloop": True})
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
