"""What a batch costs on its way to the ranks: one rank reads and sends it to all, or each reads a part. Prints JSON.

Run: python -m tests.bench.bench_batches. CPU seconds, of one thread: putting stored segments together, which is what a
reader for each replica would share out; packing a batch, sending it to another rank and unpacking it, which it saves.
`memory`: what a call with a batch takes of each rank beyond the idle process, in sizes of the batch: at its peak, and
while the call lasts. Rank 0 gets the segments, lays them out and drops them first, as the trainer does.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.node.supervisor.ports import free_port
from tests.bench.rig import rounded

ROOT = Path(__file__).resolve().parents[2]
PROMPT = 200  # tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--response", type=int, default=1800, help="tokens of a sample")
    parser.add_argument("--times", type=int, default=5, help="each is done; the least counts")
    parser.add_argument("--ranks", type=int, default=4, help="of which the memory is measured")
    parser.add_argument("--calls", type=int, default=2, help="with a batch, before the memory is read")
    parser.add_argument("--holds", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.holds:
        print(json.dumps(held(args)))
        return 0
    if args.rank:
        follow(args)
        return 0
    print(json.dumps(measure(args), indent=2))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from actors.trainer.data.assembly import assemble
    from actors.trainer.ranks import decode_batch, encode_batch

    groups = [collected(number, args) for number in range(args.groups)]
    batch = assemble(0, groups, {1: 0})
    assert batch is not None
    encoded = encode_batch(batch)
    return rounded(
        {
            "tokens": len(batch.tokens_N),
            "bytes": len(encoded),
            "put_together_s": least(lambda: assemble(0, groups, {1: 0}), args.times),
            "packed_s": least(lambda: encode_batch(batch), args.times),
            "sent_s": lead(len(encoded), args),
            "unpacked_s": least(lambda: decode_batch(encoded), args.times),
            "memory": memory(args, len(encoded)),
        }
    )


def least(call: Callable[[], object], times: int) -> float:
    found: list[float] = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def collected(group_id: int, args: argparse.Namespace) -> Any:
    """A group of samples, each one segment."""
    import numpy as np

    from actors.trainer.data.assembly import CollectedGroup
    from messages import (
        Float32Array,
        GroupCompleted,
        Int32Array,
        SampleKey,
        SampleStatus,
        SampleSummary,
        Segment,
        SegmentRef,
        SegmentsPublished,
        UInt8Array,
        WeightSpan,
    )

    size = args.response
    segments = tuple(
        Segment(
            sample=SampleKey(group_id=group_id, attempt=0, index=index),
            prompt_ids=Int32Array(np.ones(PROMPT, np.int32)),
            response_ids=Int32Array(np.ones(size, np.int32)),
            loss_mask=UInt8Array(np.ones(size, np.uint8)),
            rollout_log_probs=Float32Array(np.ones(size, np.float32)),
            weight_spans=(WeightSpan(version=1, start=0, end=size),),
        )
        for index in range(args.samples)
    )
    samples = tuple(
        SampleSummary(
            index=index,
            status=SampleStatus.COMPLETED,
            segments=(SegmentRef(seq=1, position=index),),
            prompt_len=PROMPT,
            response_len=size,
            reward=float(index % 2),
        )
        for index in range(args.samples)
    )
    completed = GroupCompleted(
        group_id=group_id, attempt=0, lease="l", round=0, instance="r", data="d", samples=samples
    )
    payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=segments)
    return CollectedGroup(completed, {1: payload})


def lead(size_bytes: int, args: argparse.Namespace) -> float:
    """CPU seconds in which a rank sends so much to another one."""
    port = free_port()
    words = ["--rank", "1", "--port", str(port), "--response", str(size_bytes), "--times", str(args.times)]
    other = subprocess.Popen([sys.executable, "-m", "tests.bench.bench_batches", *words], cwd=ROOT)
    try:
        found = share(0, port, size_bytes, args.times)
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()
    return found


def follow(args: argparse.Namespace) -> None:
    share(1, args.port, args.response, args.times)


def share(rank: int, port: int, size_bytes: int, times: int) -> float:
    import os

    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data = torch.zeros(size_bytes, dtype=torch.uint8)
    took_s = least(lambda: dist.broadcast(data, src=0), times)
    dist.destroy_process_group()
    return took_s


def memory(args: argparse.Namespace, size_bytes: int) -> list[dict[str, float]]:
    """What each rank takes of memory for a batch, in sizes of the batch."""
    port, names = free_port(), ("groups", "samples", "response", "ranks", "calls")
    options = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, "-m", "tests.bench.bench_batches", "--holds", "--port", str(port), *options]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, cwd=ROOT)
        for rank in range(args.ranks)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=600)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [{name: value / size_bytes for name, value in each.items()} for each in found]


def held(args: argparse.Namespace) -> dict[str, int]:
    """Be a rank: take part in calls with a batch; return the bytes beyond the idle process."""
    import os

    import torch
    import torch.distributed as dist

    from actors.trainer.data.assembly import assemble
    from actors.trainer.data.batch import TrainBatch
    from actors.trainer.megatron.groups import Ranks
    from actors.trainer.ranks import RankCalls, on_all_ranks

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", args.port, args.ranks, is_master=args.rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=args.rank, world_size=args.ranks)
    dist.broadcast(torch.zeros(8), src=0)

    class Holder:
        def __init__(self) -> None:
            ranks = Ranks(rank=args.rank, world_size=args.ranks, store=dist.PrefixStore("calls", store))
            self.calls = RankCalls(ranks, torch.device("cpu"))
            self.calls.serve(self)
            self.found: dict[str, int] = {}

        @on_all_ranks
        def take(self, batch: TrainBatch) -> None:
            assert len(batch.tokens_N)
            self.found = {"peak": status_bytes("VmHWM") - idle, "while_it_lasts": status_bytes("VmRSS") - idle}

    holder, idle = Holder(), status_bytes("VmRSS")
    for _ in range(args.calls):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        if args.rank == 0:
            batch = assemble(0, [collected(number, args) for number in range(args.groups)], {1: 0})
            assert batch is not None
            holder.take(batch)
            del batch
    if args.rank == 0:
        holder.calls.stop_others()
    else:
        holder.calls.follow()
    dist.destroy_process_group()
    return holder.found


def status_bytes(name: str) -> int:
    """A figure of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
