"""What a batch costs on its way to the ranks: one rank reads and sends it to all, or each reads a part. Prints JSON.

Run: python -m tests.bench.bench_batches. CPU seconds, of one thread: putting stored segments together, which is what a
reader for each replica would share out; packing a batch, sending it to another rank and unpacking it, which it saves.
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
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(main())
