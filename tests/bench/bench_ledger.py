"""The ledger: groups per second through fold and decide alone, and through a real buffer on a real bus. Prints JSON.

Groups live whole lives: issued twice as many as a step takes, completed in random order, judged, put in batches,
trained; what a halt leaves over is aborted and issued again; every so many steps there is a checkpoint, and a snapshot.

Pure: only the CPU time of fold and decide counts, one decide after each event, as the buffer does. Memory is that of
the process after a quarter of the events and at the end.

Bus: nats-server and the buffer as a run starts it, each in its process; this process plays everybody else. It takes the
tasks, publishes completions and verdicts, and trains in no time.

Run: python -m tests.bench.bench_ledger
"""

import argparse
import cProfile
import gc
import itertools
import json
import pstats
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil

from actors.buffer.deciding.decide import Schedule, decide
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    GroupsIssued,
    IssuedGroup,
    Message,
    Outcome,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsSpilled,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.bus.consumer import Delivery
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.snapshots import lines_of, pack_state, unpack_state
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.process.logs import configure_logging
from runtime.settings.load import load_topology
from runtime.settings.topology import Topology, encode_topology
from tests.bench.rig import (
    NATS,
    ROOT,
    check_alive,
    connected,
    cpu_seconds,
    difference,
    nats_process,
    processes,
    rounded,
    showing_logs,
    specs_of,
)
from tests.support.running_server import running_server

RECIPE = ROOT / "topologies" / "laptop.toml"
TARGETS = {"pure_groups_per_s": 2000, "bus_groups_per_s": 300}
AN_HOUR = 720_000  # events, at 200 per second
SAVE_INTERVAL = 20  # train steps
TASKS_AT_ONCE = 64
WITHOUT_END = 1_000_000  # train steps


@dataclass(frozen=True)
class Size:
    """Of a train step."""

    num_groups: int
    num_issued: int  # at a time
    num_samples: int  # per group


# what everybody but the buffer says


def samples(size: Size, first_seq: int, status: SampleStatus) -> tuple[SampleSummary, ...]:
    """Summaries as a rollout actor makes them: one segment each, stored one by one."""
    return tuple(
        SampleSummary(
            index=index,
            status=status,
            segments=(SegmentRef(seq=first_seq + index, position=0),),
            prompt_len=200,
            response_len=2300,
            reward=None if status is SampleStatus.ABORTED else 1.0,
            first_version=1,
            last_version=1,
        )
        for index in range(size.num_samples)
    )


def completed(size: Size, group_id: int, attempt: int, round: int, first_seq: int) -> GroupCompleted:
    return GroupCompleted(
        group_id=group_id,
        attempt=attempt,
        lease="0123456789abcdef0123456789abcdef",
        round=round,
        instance="rollout.0",
        data="gsm8k",
        samples=samples(size, first_seq, SampleStatus.COMPLETED),
    )


def aborted(size: Size, group_id: int, attempt: int, round: int, first_seq: int) -> GroupAborted:
    return GroupAborted(
        group_id=group_id,
        attempt=attempt,
        lease="0123456789abcdef0123456789abcdef",
        round=round,
        instance="rollout.0",
        samples=samples(size, first_seq, SampleStatus.ABORTED),
    )


def trained(size: Size, step: int) -> BatchTrained:
    num_samples = size.num_groups * size.num_samples
    return BatchTrained(
        step=step,
        incarnation=1,
        num_groups=size.num_groups,
        num_samples=num_samples,
        num_tokens=2500 * num_samples,
        metrics={"train/loss": 0.1},
    )


def announced(step: int) -> WeightsAnnounced:
    return WeightsAnnounced(version=step + 1, step=step, incarnation=1, path="nowhere", checksum="sum", size_bytes=0)


def saved(step: int) -> CheckpointSaved:
    oldest = max(0, step - SAVE_INTERVAL)
    return CheckpointSaved(step=step, incarnation=1, path="nowhere", oldest_step=oldest, took_s=1.0)


# fold and decide alone


class Life:
    """A log without a bus: everybody's next word, folded at once, with the time that fold and decide take."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.state = LedgerState()
        self.schedule = Schedule(
            num_steps=WITHOUT_END,
            rollout_batch_size=size.num_groups,
            over_sampling_batch_size=size.num_issued,
            max_attempts=WITHOUT_END,
        )
        self.seq = 0
        self.spent_s = 0.0
        self._random = random.Random(0)
        self._tasks: list[tuple[int, int, int]] = []  # group, attempt, round
        self._payload_seq = 0

    def begin(self) -> None:
        self._say(TrainerStarted(incarnation=1, step=0))
        self._say(announced(0))

    def go_on(self) -> None:
        """One group is generated and judged."""
        group_id, attempt, round = self._take(self._random.randrange(len(self._tasks)))
        self._payload_seq += self.size.num_samples
        self._say(completed(self.size, group_id, attempt, round, self._payload_seq))
        self._say(VerdictGiven(group_id=group_id, attempt=attempt, event_seq=self.seq, outcome=Outcome.KEEP))

    def _say(self, event: Message) -> None:
        """Log an event, then all that the buffer decides."""
        following: Message | None = event
        while following is not None:
            self.seq += 1
            logged = following
            begin = time.thread_time()
            fold(self.state, logged, self.seq)
            following = decide(self.state, self.schedule)
            self.spent_s += time.thread_time() - begin
            self._react(logged)

    def _react(self, event: Message) -> None:
        match event:
            case GroupsIssued():
                self._tasks += [(issued.group_id, issued.attempt, event.round) for issued in event.groups]
            case RoundHalted():
                while self._tasks:
                    self._payload_seq += self.size.num_samples
                    self._fold(aborted(self.size, *self._take(-1), self._payload_seq))
            case BatchReady():
                self._fold(trained(self.size, event.step))
                if (event.step + 1) % SAVE_INTERVAL == 0:
                    self._fold(saved(event.step + 1))
                self._fold(announced(event.step + 1))
            case _:
                pass

    def _fold(self, event: Message) -> None:
        """Log an event while a decision is being made: the next one is made on both."""
        self.seq += 1
        begin = time.thread_time()
        fold(self.state, event, self.seq)
        self.spent_s += time.thread_time() - begin

    def _take(self, index: int) -> tuple[int, int, int]:
        self._tasks[index], self._tasks[-1] = self._tasks[-1], self._tasks[index]
        return self._tasks.pop()


def measure_pure(size: Size, num_events: int, *, profile: bool) -> dict[str, Any]:
    life = Life(size)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    life.begin()
    quarter = 0
    while life.seq < num_events:
        life.go_on()
        if not quarter and life.seq >= num_events // 4:
            quarter = memory()
    profiler.disable()
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    assert life.state.books().closed
    return {
        "groups_per_step": size.num_groups,
        "issued_at_a_time": size.num_issued,
        "events": life.seq,
        "groups_trained": life.state.trained,
        "groups_per_s": life.state.trained / life.spent_s,
        "events_per_s": life.seq / life.spent_s,
        "rss_mb_at_a_quarter": quarter / 1e6,
        "rss_mb_at_the_end": memory() / 1e6,
        "state_bytes": len(msgspec.json.encode(life.state)),
    }


def memory() -> int:
    """Resident bytes of this process, without what the collector can free."""
    gc.collect()
    return psutil.Process().memory_info().rss


# spills and snapshots


def measure_spills(num_groups: int = 512, num_samples: int = 8, num_spills: int = 60) -> dict[str, Any]:
    """Bytes of the spill events of a step whose samples all run for 60 minutes: a spill a minute, of one segment."""
    sizes = {"increments_mb": 0.0, "whole_mb": 0.0}  # whole: each event lists all segments so far, as before
    for spill in range(num_spills):
        for name, first in (("increments_mb", spill), ("whole_mb", 0)):
            told = tuple(
                msgspec.structs.replace(
                    sample,
                    response_len=600 * (spill + 1),
                    segments=tuple(
                        SegmentRef(seq=10_000_000 + part, position=sample.index) for part in range(first, spill + 1)
                    ),
                )
                for sample in samples(Size(1, 1, num_samples), 1, SampleStatus.ABORTED)
            )
            event = SegmentsSpilled(
                group_id=100_000,
                attempt=0,
                lease="0123456789abcdef0123456789abcdef",
                round=10,
                instance="rollout.0",
                samples=told,
                starts=(first,) * num_samples,
            )
            sizes[name] += num_groups * len(msgspec.json.encode(event)) / 1e6
    return {"groups": num_groups, "samples": num_samples, "spills": num_spills, **sizes}


def measure_snapshot(num_groups: int = 100_000) -> dict[str, Any]:
    """CPU seconds and bytes of a snapshot with so many groups in flight, and of its longest line."""
    state = LedgerState()
    for round, first in enumerate(range(0, num_groups, 1000)):
        groups = tuple(IssuedGroup(group_id=i, attempt=0, prompt=i) for i in range(first, first + 1000))
        fold(state, GroupsIssued(incarnation=1, round=round, min_version=1, groups=groups), round + 1)
    began = time.thread_time()
    packed = pack_state(state)
    packed_s, began = time.thread_time() - began, time.thread_time()
    unpack_state(packed.chunks, packed.digest)
    unpacked_s, longest_s = time.thread_time() - began, 0.0
    for line in lines_of(state):
        began = time.thread_time()
        msgspec.json.encode(line)
        longest_s = max(longest_s, time.thread_time() - began)
    return {
        "groups": num_groups,
        "pack_s": packed_s,
        "unpack_s": unpacked_s,
        "longest_line_ms": 1e3 * longest_s,
        "chunks": len(packed.chunks),
        "chunks_mb": packed.size / 1e6,
    }


# over the bus


class Everybody:
    """All actors but the buffer, none of which takes any time."""

    def __init__(self, bus: Bus, size: Size) -> None:
        self._bus = bus
        self._size = size
        self._halted = -1

    async def run(self) -> None:
        await self._bus.publish(TrainerStarted(incarnation=1, step=0))
        await self._bus.publish(announced(0))
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_log)
            group.start_soon(self._generate)

    async def _follow_log(self) -> None:
        async with self._bus.read(BatchReady, RoundHalted) as events:
            async for received in events:
                match received.message:
                    case RoundHalted(round=round):
                        self._halted = round
                    case BatchReady(step=step):
                        await self._bus.publish(trained(self._size, step))
                        if (step + 1) % SAVE_INTERVAL == 0:
                            await self._bus.publish(saved(step + 1))
                        await self._bus.publish(announced(step + 1))

    async def _generate(self) -> None:
        async with (
            self._bus.consume(
                RolloutRequested, durable="rollout-policy", max_ack_pending=4096, prefetch=TASKS_AT_ONCE
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            limiter = anyio.Semaphore(TASKS_AT_ONCE)
            while True:
                await limiter.acquire()
                group.start_soon(self._end, await anext(deliveries), limiter)

    async def _end(self, delivery: Delivery[RolloutRequested], limiter: anyio.Semaphore) -> None:
        task = delivery.message
        who = (task.group_id, task.attempt)
        if task.round <= self._halted:
            await self._bus.publish(aborted(self._size, *who, task.round, 1))
        else:
            seq = await self._bus.publish(completed(self._size, *who, task.round, 1))
            verdict = VerdictGiven(group_id=who[0], attempt=who[1], event_seq=seq, outcome=Outcome.KEEP)
            await self._bus.publish(verdict)
        await delivery.ack()
        limiter.release()


async def measure_bus(size: Size, num_steps: int, staleness: int, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(timeout_s):
        run_dir = Path(folder)
        topology = topology_of(size, staleness)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        commands = {spec.name: list(spec.command) for spec in specs_of(topology, run_dir) if spec.name == "buffer"}
        async with running_server(run_dir / "bus") as server, connected(server.url, topology) as bus:
            with showing_logs(run_dir), processes(commands, run_dir, server.url) as running:
                async with anyio.create_task_group() as group:
                    group.start_soon(Everybody(bus, size).run)
                    figures = await watch(bus, size, num_steps, running | {NATS: nats_process()})
                    group.cancel_scope.cancel()
    return {"max_staleness": staleness, **figures}


def topology_of(size: Size, staleness: int) -> Topology:
    changes = [
        f"train.num_steps={WITHOUT_END}",
        f"rollout.rollout_batch_size={size.num_groups}",
        f"rollout.over_sampling_batch_size={size.num_issued}",
        f"rollout.n_samples_per_prompt={size.num_samples}",
        f"rollout.max_staleness={staleness}",
        "rollout.max_attempts=1000",
    ]
    return msgspec.structs.replace(load_topology(RECIPE, changes).topology, eval=())


async def watch(bus: Bus, size: Size, num_steps: int, watched: dict[str, psutil.Process]) -> dict[str, Any]:
    """Groups per second by the log's clock, and the CPU that each costs; the first steps only warm up."""
    watched = {**watched, "everybody else": psutil.Process()}
    warm_up, times_s, before = max(1, num_steps // 10), list[float](), dict[str, float]()
    async with bus.read(BatchTrained) as events:
        while len(times_s) <= num_steps:
            received = await events.next(timeout_s=1.0)
            if received is None:
                check_alive(watched)
                continue
            if received.message.step == warm_up:
                before = cpu_seconds(watched)
            if received.message.step >= warm_up:
                times_s.append(received.time.timestamp())
    spent = difference(cpu_seconds(watched), before)
    num_groups = num_steps * size.num_groups
    step_s = statistics.median(end - begin for begin, end in itertools.pairwise(times_s))
    return {
        "groups": num_groups,
        "groups_per_s": num_groups / (times_s[-1] - times_s[0]),
        "groups_per_s_median_step": size.num_groups / step_s,
        "cpu_us_per_group": {name: 1e6 * seconds / num_groups for name, seconds in spent.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=AN_HOUR, help="events through fold and decide")
    parser.add_argument("--big-events", type=int, default=100_000, help="the same with 512 groups a step")
    parser.add_argument("--groups", type=int, default=32, help="prompt groups per step; twice as many are issued")
    parser.add_argument("--samples", type=int, default=8, help="samples per group")
    parser.add_argument("--steps", type=int, default=200, help="train steps over the bus; 0: leave the bus out")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each measurement over the bus")
    parser.add_argument("--profile", action="store_true", help="say where the time of fold and decide goes")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    size = Size(args.groups, 2 * args.groups, args.samples)
    results: dict[str, Any] = {"targets": TARGETS, "pure": measure_pure(size, args.events, profile=args.profile)}
    if args.big_events:
        results["pure_512"] = measure_pure(Size(512, 1024, args.samples), args.big_events, profile=args.profile)
    results["spills"], results["snapshot"] = measure_spills(), measure_snapshot()
    if args.steps:
        results["bus"] = [
            anyio.run(measure_bus, size, args.steps, staleness, args.timeout, backend_options={"use_uvloop": True})
            for staleness in (0, 1)
        ]
    print(json.dumps(rounded(results), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
