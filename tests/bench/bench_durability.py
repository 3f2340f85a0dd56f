"""Durability in the units of a published store of trajectories (verl's RFC), with its figures beside. Prints JSON.

- stored: samples (trajectories) of a group published durably a second, payload and event confirmed by the server, from
  one process with many under way.
- N_live: one decide among N live groups, of which half wait for a verdict: where nothing is due, and where a batch is;
  the fold of their events after a restart, and the decoding of a snapshot in their place.
- kill_to_rebuilt_s: seconds from SIGKILL of the buffer among so many live groups until its successor has the state
  again and says so; it decides from then on. Running samples go on meanwhile. The successor is started at once, as a
  supervisor does; its imports count.
- burst: 512 requests at once that store 64 payloads of 500 KB and 208 of 3.3 MB, and 240 small ones: how many are
  stored, and how long until the last one is.

The other store's figures are its authors', on their machine: compare orders of magnitude.

Run: python -m tests.bench.bench_durability
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import numpy as np
import psutil

from actors.buffer.deciding.decide import Schedule, decide
from messages import (
    BufferStarted,
    Float32Array,
    GroupCompleted,
    GroupsIssued,
    Int32Array,
    Message,
    Outcome,
    Plane,
    SampleKey,
    Segment,
    SegmentsPublished,
    TrainerStarted,
    UInt8Array,
    VerdictGiven,
    WeightSpan,
)
from runtime.bus.bus import Bus
from runtime.ledger.fold import LedgerState, fold
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.process.logs import configure_logging
from runtime.settings.topology import encode_topology
from tests.bench.bench_ledger import Size, announced, completed, topology_of
from tests.bench.rig import check_alive, connected, processes, rounded, showing_logs, specs_of
from tests.support.running_server import running_server

THEIRS: Final = {  # volcengine/verl, the RFC of a durable store of trajectories
    "trajectories_per_s": 2800,
    "decide_ms_at_50000_live": 152,
    "rebuild_s_at_50000_live": 0.59,
    "crash_to_first_sample_s": 3,
}
BURST: Final = ((64, 500_000), (208, 3_300_000), (240, 1_000))  # requests, bytes of each
WITHOUT_END: Final = 1_000_000
MOST_ISSUED: Final = 40_000  # groups of one issue, whose closing is one event


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000, help="groups to store")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--tokens", type=int, default=500, help="of a sample")
    parser.add_argument("--in-flight", type=int, default=64, help="groups being stored")
    parser.add_argument("--live", type=int, nargs="+", default=[5_000, 50_000], help="live groups")
    parser.add_argument("--decides", type=int, default=20, help="decisions, of which the median counts")
    parser.add_argument("--burst", type=float, default=1.0, help="share of the burst's requests")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each measurement")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    loop: dict[str, Any] = {"backend_options": {"use_uvloop": True}}
    results: dict[str, Any] = {"theirs": THEIRS, "stored": anyio.run(stored, args, **loop)}
    for num_live in args.live:
        results[f"{num_live}_live"] = ledger(num_live, args.samples, args.decides)
        results[f"{num_live}_live"]["kill_to_rebuilt_s"] = anyio.run(restarted, num_live, args, **loop)
        results[f"{num_live}_live"]["kill_to_rebuilt_live"] = min(num_live, MOST_ISSUED)
    results["burst"] = anyio.run(burst, args, **loop)
    print(json.dumps(rounded(results), indent=2))
    return 0


# storing


def payload_of(group_id: int, num_samples: int, num_tokens: int) -> SegmentsPublished:
    rng = np.random.default_rng(1)
    segments = tuple(
        Segment(
            sample=SampleKey(group_id=group_id, attempt=1, index=index),
            prompt_ids=Int32Array(rng.integers(0, 150_000, 8)),
            response_ids=Int32Array(rng.integers(0, 150_000, num_tokens)),
            loss_mask=UInt8Array(np.ones(num_tokens, np.uint8)),
            rollout_log_probs=Float32Array(rng.normal(size=num_tokens)),
            weight_spans=(WeightSpan(version=1, start=0, end=num_tokens),),
        )
        for index in range(num_samples)
    )
    return SegmentsPublished(group_id=group_id, attempt=1, lease="lease", segments=segments)


async def stored(args: argparse.Namespace) -> dict[str, float]:
    """Groups with payload and event, many under way."""
    size = Size(args.groups, args.groups, args.samples)
    payload = payload_of(1, args.samples, args.tokens)
    left = iter(range(args.groups))
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(args.timeout):
        topology = topology_of(size, 0)
        async with running_server(Path(folder)) as server, connected(server.url, topology) as bus:

            async def store() -> None:
                for group_id in left:
                    seq = await bus.publish(payload)
                    await bus.publish(completed(size, group_id, 1, 0, seq))

            begin, cpu = time.monotonic(), time.process_time()
            async with anyio.create_task_group() as group:
                for _ in range(args.in_flight):
                    group.start_soon(store)
            took_s, cpu_s = time.monotonic() - begin, time.process_time() - cpu
            num_bytes = (await bus.state(Plane.DATA)).bytes
    num_samples = args.groups * args.samples
    return {
        "trajectories_per_s": num_samples / took_s,
        "trajectories_per_cpu_s_of_the_writer": num_samples / cpu_s,
        "mb_per_s": num_bytes / took_s / 1e6,
    }


# the ledger


def events_of(num_live: int, num_samples: int) -> list[Message]:
    """A log after which so many groups are live: half are at work, half are complete and wait for a verdict."""
    size = Size(num_live, num_live, num_samples)
    state, schedule = LedgerState(), schedule_of(num_live)
    events: list[Message] = []

    def say(event: Message | None) -> None:
        while event is not None:
            events.append(event)
            fold(state, event, len(events))
            event = decide(state, schedule)

    say(TrainerStarted(incarnation=1, step=0))
    say(announced(0))
    issued = [
        (each.group_id, each.attempt) for event in events if isinstance(event, GroupsIssued) for each in event.groups
    ]
    random.Random(0).shuffle(issued)
    for group_id, attempt in issued[: num_live // 2]:
        event = completed(size, group_id, attempt, 0, group_id * num_samples + 1)
        events.append(event)
        fold(state, event, len(events))
    return events


def schedule_of(num_live: int) -> Schedule:
    return Schedule(
        num_steps=WITHOUT_END,
        rollout_batch_size=max(1, min(512, num_live // 4)),
        over_sampling_batch_size=num_live,
        max_attempts=WITHOUT_END,
    )


def ledger(num_live: int, num_samples: int, num_decides: int) -> dict[str, float]:
    """CPU seconds of fold and decide."""
    events, schedule = events_of(num_live, num_samples), schedule_of(num_live)
    begin, state = time.thread_time(), LedgerState()
    for seq, event in enumerate(events, 1):
        fold(state, event, seq)
    fold_s, took_s = time.thread_time() - begin, list[float]()
    for _ in range(num_decides):
        begin = time.thread_time()
        assert decide(state, schedule) is None
        took_s.append(time.thread_time() - begin)
    begin = time.thread_time()
    snapshot = msgspec.json.encode(state)
    encoded_s = time.thread_time() - begin
    begin = time.thread_time()
    assert len(msgspec.json.decode(snapshot, type=LedgerState).groups) == num_live
    decoded_s = time.thread_time() - begin
    judged = [event for event in events if isinstance(event, GroupCompleted)][: schedule.rollout_batch_size]
    seqs = {event.group_id: seq for seq, event in enumerate(events, 1) if isinstance(event, GroupCompleted)}
    for number, event in enumerate(judged, 1):
        names = {"group_id": event.group_id, "attempt": event.attempt}
        kept = VerdictGiven(**names, event_seq=seqs[event.group_id], outcome=Outcome.KEEP)
        fold(state, kept, len(events) + number)
    begin = time.thread_time()
    assert decide(state, schedule) is not None
    due_s = time.thread_time() - begin
    return {
        "decide_ms": 1e3 * statistics.median(took_s),
        "decide_of_a_full_batch_ms": 1e3 * due_s,
        "fold_of_all_events_s": fold_s,
        "snapshot_encode_s": encoded_s,
        "rebuild_from_snapshot_s": decoded_s,
        "snapshot_mb": len(snapshot) / 1e6,
    }


async def restarted(num_live: int, args: argparse.Namespace) -> float:
    """Seconds from the kill of a buffer until its successor has read the log."""
    num_live = min(num_live, MOST_ISSUED)  # the result says how many
    size = Size(max(1, min(512, num_live // 4)), num_live, args.samples)
    topology = topology_of(size, 0)
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(args.timeout):
        run_dir = Path(folder)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        command = {spec.name: list(spec.command) for spec in specs_of(topology, run_dir) if spec.name == "buffer"}
        async with running_server(run_dir / "bus") as server, connected(server.url, topology) as bus:
            with showing_logs(run_dir):
                await bus.publish(TrainerStarted(incarnation=1, step=0))
                await bus.publish(announced(0))
                with processes(command, run_dir, server.url) as running:
                    await tasks_put(bus, num_live, running)
                    await complete(bus, size, num_live // 2, args.in_flight)
                    begin, seq = time.monotonic(), (await bus.state(Plane.EVENT)).last_seq
                    running["buffer"].kill()
                with processes(command, run_dir, server.url) as running:
                    async with bus.read(BufferStarted, from_seq=seq + 1) as events:
                        while await events.next(0.1) is None:
                            check_alive(running)
                    return time.monotonic() - begin


async def tasks_put(bus: Bus, number: int, watched: dict[str, psutil.Process]) -> None:
    """Wait until the buffer has put the tasks of all groups."""
    while (await bus.state(Plane.WORK)).last_seq < number:
        check_alive(watched)
        await anyio.sleep(0.1)


async def complete(bus: Bus, size: Size, number: int, in_flight: int) -> None:
    """Publish that groups are complete."""
    left = iter(range(number))

    async def work() -> None:
        for group_id in left:
            await bus.publish(completed(size, group_id, 0, 0, group_id * size.num_samples + 1))

    async with anyio.create_task_group() as group:
        for _ in range(in_flight):
            group.start_soon(work)


# a burst


async def burst(args: argparse.Namespace) -> dict[str, float]:
    """Requests at once, each of which stores one payload."""
    sizes = [size for number, size in BURST for _ in range(max(1, round(number * args.burst)))]
    random.Random(0).shuffle(sizes)
    took_s = list[float]()
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(args.timeout):
        topology = topology_of(Size(4, 4, 4), 0)
        async with running_server(Path(folder)) as server, connected(server.url, topology) as bus:
            payloads = {size: payload_of(1, 1, max(1, size // 9)) for _, size in BURST}  # 4 + 1 + 4 bytes a token
            begin = time.monotonic()

            async def store(size: int) -> None:
                await bus.publish(payloads[size])
                took_s.append(time.monotonic() - begin)

            async with anyio.create_task_group() as group:
                for size in sizes:
                    group.start_soon(store, size)
            num_stored = (await bus.state(Plane.DATA)).messages
    return {
        "requests": len(sizes),
        "stored": num_stored,
        "mb": sum(sizes) / 1e6,
        "p50_s": statistics.median(took_s),
        "last_s": max(took_s),
    }


if __name__ == "__main__":
    sys.exit(main())
