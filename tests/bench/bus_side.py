"""Prompt groups from a rollout-like process to a trainer-like one, over the bus. Started by bench_ray.

The producer stores a group's segments (data plane) and says that it is complete (event plane), both confirmed by the
server. The consumer reads the event, fetches the segments by their sequence and has them as arrays.

Run: PHYSARUM_BUS_URL=... python -m tests.bench.bus_side {produce,consume} ...
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import TypeVar

import anyio
import numpy as np

from messages import (
    Float32Array,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    Message,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
)
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.bus.events import Events
from runtime.process.logs import configure_logging
from runtime.process.main import spare_the_collector

RUN = "bench"
NUM_FETCHERS = 8  # as the trainer's feed has
WAIT_S = 30.0

MessageT = TypeVar("MessageT", bound=Message)

Times = tuple[float, float]  # when a group's way began and ended


def segments_of(group_id: int, args: argparse.Namespace) -> tuple[Segment, ...]:
    """A group as a rollout actor holds it once its engine has answered."""
    random = np.random.default_rng(1)
    response = args.tokens // args.samples - args.prompt
    return tuple(
        Segment(
            sample=SampleKey(group_id=group_id, attempt=0, index=index),
            prompt_ids=Int32Array(random.integers(0, 150_000, args.prompt)),
            response_ids=Int32Array(random.integers(0, 150_000, response)),
            loss_mask=UInt8Array(np.ones(response, np.uint8)),
            rollout_log_probs=Float32Array(random.normal(size=response).astype(np.float32)),
            weight_spans=(WeightSpan(version=1, start=0, end=response),),
        )
        for index in range(args.samples)
    )


async def send(bus: Bus, group_id: int, segments: tuple[Segment, ...], args: argparse.Namespace) -> None:
    """Store a group and say so; the event carries when that began."""
    begun = time.monotonic()
    stored = SegmentsPublished(group_id=group_id, attempt=0, lease="lease", segments=segments)
    seq = await bus.publish(stored)
    samples = tuple(
        SampleSummary(
            index=index,
            status=SampleStatus.COMPLETED,
            segments=(SegmentRef(seq=seq, position=index),),
            prompt_len=args.prompt,
            response_len=len(segment.response_ids),
            reward=1.0,
        )
        for index, segment in enumerate(segments)
    )
    completed = GroupCompleted(
        group_id=group_id,
        attempt=0,
        lease="lease",
        round=0,
        instance="rollout.0",
        data="bench",
        samples=samples,
        metadata={"begun": begun},
    )
    await bus.publish(completed)


async def produce(bus: Bus, args: argparse.Namespace) -> None:
    """First many at a time, once the consumer is there, then one after another, each when the consumer asks for it."""
    segments = segments_of(0, args)
    left = iter(range(args.groups))

    async def worker() -> None:
        for group_id in left:
            await send(bus, group_id, segments, args)

    async with bus.read(GroupFailed) as asked:
        await next_of(asked)
        async with anyio.create_task_group() as group:
            for _ in range(args.in_flight):
                group.start_soon(worker)
        for _ in range(args.latency_groups):
            await send(bus, (await next_of(asked)).group_id, segments, args)


async def consume(bus: Bus, args: argparse.Namespace) -> None:
    """Take all groups; print how many per second, and how long one takes alone."""
    async with bus.read(GroupCompleted) as events:
        await ask_for(bus, 0)
        together = await take_together(bus, events, args)
        alone: list[float] = []
        for number in range(args.latency_groups):
            await ask_for(bus, args.groups + number)
            begun, ended = await take(bus, await next_of(events), args)
            alone.append(ended - begun)
    took_s = max(end for _, end in together) - min(begun for begun, _ in together)
    print(json.dumps({"groups_per_s": len(together) / took_s, "latency_ms": 1e3 * statistics.median(alone)}))


async def ask_for(bus: Bus, group_id: int) -> None:
    """Tell the producer to go on, by an event that serves no other purpose here."""
    await bus.publish(GroupFailed(group_id=group_id, attempt=0, lease="", round=0, instance="", reason="next"))


async def take_together(
    bus: Bus, events: Events[GroupCompleted], args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Begin and end of each group that is sent while others are under way; the first tenth only warms up."""
    times: list[Times] = []
    to_fetch, waiting = anyio.create_memory_object_stream[GroupCompleted](1024)

    async def fetch() -> None:
        times.extend([await take(bus, completed, args) async for completed in waiting])

    with to_fetch, waiting:
        async with anyio.create_task_group() as group:
            for _ in range(NUM_FETCHERS):
                group.start_soon(fetch)
            for _ in range(args.groups):
                await to_fetch.send(await next_of(events))
            to_fetch.close()  # the fetchers end once nothing waits
    return sorted(times)[args.groups // 10 :]


async def next_of(events: Events[MessageT]) -> MessageT:
    received = await events.next(WAIT_S)
    assert received is not None, "the other side is silent"
    return received.message


async def take(bus: Bus, completed: GroupCompleted, args: argparse.Namespace) -> Times:
    """Fetch a group; return when its way began and when its arrays were at hand."""
    (seq,) = {ref.seq for sample in completed.samples for ref in sample.segments}
    stored = await bus.fetch(SegmentsPublished, seq)
    ended = time.monotonic()
    assert sum(len(segment.prompt_ids) + len(segment.response_ids) for segment in stored.segments) == args.tokens
    return completed.metadata["begun"], ended


async def run(args: argparse.Namespace) -> None:
    async with Bus.connect(os.environ[BUS_URL_VARIABLE], RUN, name=args.role) as bus:
        spare_the_collector()
        await (produce if args.role == "produce" else consume)(bus, args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("produce", "consume"))
    for name in ("groups", "latency-groups", "samples", "tokens", "prompt", "in-flight"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    configure_logging(args.role, RUN)
    anyio.run(run, args, backend_options={"use_uvloop": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
