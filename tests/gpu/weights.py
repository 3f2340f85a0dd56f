"""Weights to an engine's process on the same GPU: by CUDA IPC, by NCCL, in FP8; against copies on the device."""

import json
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.trainer.megatron import groups as ranks
from actors.trainer.weights.broadcast import StageGroup
from actors.trainer.weights.cast import quantized, to_fp8
from actors.trainer.weights.engines import aligned, described, fingerprints_of, flattened
from actors.trainer.weights.gathering import Bucket
from actors.trainer.weights.gpu_handles import handle_of
from actors.trainer.weights.shared_memory import bucket_payload, payload_of, segment
from runtime.settings.tables.trainer import MegatronConfig
from tests.gpu.measured import Measured, forget_peak, seconds, used_bytes

ROOT = Path(__file__).parents[2]
NUMBERS = count()  # of segments
DIES_S = 20.0
SIZES = {"dtypes": (torch.bfloat16, torch.float32, torch.float8_e4m3fn), "rows": 8192, "buckets": 4}
TINY = SIZES | {"rows": 16}


class Reader:
    """The other process."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.gpu.reader"]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, payload: str, do: str) -> dict[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"payload": payload, "do": do}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the reader ended with {self.process.wait(DIES_S)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DIES_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def told(bucket: Bucket, device: str) -> Generator[str]:
    """What another process reads a bucket by: a handle on a GPU, a segment's name on the CPU; it lives in the block."""
    step, flat = described("s", 0, 0, bucket), flattened(bucket)
    if device == "cuda":
        yield bucket_payload(handle_of(flat), step)
        del flat
        torch.cuda.ipc_collect()
        return
    with segment(f"physarum-gpu-test-{id(bucket)}-{next(NUMBERS)}", flat, 1) as (name,):
        yield payload_of(name, step, flat.nbytes)


def buckets_of(device: str, size: Mapping[str, Any]) -> list[Bucket]:
    """Random tensors of several dtypes, each bucket of the same bytes."""
    generator = torch.Generator(device=device).manual_seed(1)
    return [
        aligned(
            [
                (f"{number}.{dtype}", torch.randn(size["rows"], 1024, generator=generator, device=device).to(dtype))
                for dtype in size["dtypes"]
            ]
        )
        for number in range(size["buckets"])
    ]


def ipc(device: str, *, tiny: bool = False) -> Measured:
    """Buckets as another process finds them; their memory goes once they are read, and what a death leaves of it."""
    sent, problems = buckets_of(device, TINY if tiny else SIZES), list[str]()
    reader = Reader()
    try:
        for index, bucket in enumerate(sent):
            with told(bucket, device) as payload:
                if reader.ask(payload, "sums") != fingerprints_of(bucket):
                    problems.append(f"bucket {index} was read otherwise than it is")
            if index == 0:
                before = used_bytes(device)  # of the buckets themselves; contexts are made
        after = used_bytes(device)
        if before is not None and after is not None and after > before:
            problems.append(f"{after - before} bytes of buckets that were read are still there")
        with told(sent[0], device) as payload:
            reader.ask(payload, "hold")
            reader.kill()
        left = used_bytes(device)
        reader = Reader()
        with told(sent[1], device) as payload:  # and the next process is told of the next one
            if reader.ask(payload, "sums") != fingerprints_of(sent[1]):
                problems.append("after a death a bucket was read otherwise than it is")
    finally:
        reader.kill()
    size_bytes = sum(tensor.nbytes for _, tensor in sent[0])
    left_bytes = None if left is None or after is None else left - after
    if left_bytes is not None and left_bytes > size_bytes:
        problems.append(f"a death left {left_bytes} bytes, more than the bucket of {size_bytes}")
    return Measured({"bucket_bytes": size_bytes, "left_after_a_death_bytes": left_bytes}, problems)


def update(device: str, *, tiny: bool = False) -> Measured:
    """Seconds that all buckets take to another process's tensors, and the same bytes copied on the device."""
    sent = buckets_of(device, TINY if tiny else SIZES | {"buckets": 16})
    flats = [flattened(bucket) for bucket in sent]
    room = torch.empty_like(flats[0])

    def hand_over() -> None:
        for bucket in sent:
            with told(bucket, device) as payload:
                reader.ask(payload, "load")

    reader = Reader()
    try:
        hand_over()  # warms up
        by_ipc = seconds(hand_over, device, times=5)
    finally:
        reader.kill()
    by_copy = seconds(lambda: [room.copy_(flat) for flat in flats], device, times=5)
    numbers = {"bytes": sum(flat.nbytes for flat in flats), "ipc_s": by_ipc, "copy_s": by_copy}
    return Measured({**numbers, "factor": by_ipc / by_copy}, [])


def nccl(device: str, *, tiny: bool = False) -> Measured:
    """A stage's group with nobody else in it, and the ranks' own: a broadcast changes nothing, in which time."""
    ranks.join(ranks.Ranks(), MegatronConfig(), torch.device(device), seed=1)
    flat = flattened(buckets_of(device, TINY if tiny else SIZES)[0])
    before = flat.clone()
    group = StageGroup("physarum-gpu-test", "127.0.0.1", 1, torch.device(device), timeout_s=60.0)
    group.join()
    took_s = seconds(lambda: group.broadcast(flat).result(), device, times=5)
    group.leave()
    said = ranks.all_gather_objects({"rank": 0})
    ranks.leave()
    problems = [] if torch.equal(flat, before) else ["the broadcast changed what was sent"]
    return Measured({"bytes": flat.nbytes, "s": took_s, "says": len(said)}, problems)


def fp8(device: str, *, tiny: bool = False) -> Measured:
    """The cast on the device against the CPU's, bit by bit, of all kinds of matrices; seconds of large ones."""
    problems: list[str] = []
    generator = torch.Generator().manual_seed(1)
    for rows, columns in [(1, 1), (130, 256), (300, 200), (128, 4096 if not tiny else 256)]:
        for scale in (1e-30, 0.02, 60.0):
            matrix = torch.randn(rows, columns, generator=generator) * scale
            matrix[: rows // 3] = 0
            for dtype in (torch.float32, torch.bfloat16):
                right, own = quantized("m", matrix.to(dtype)), quantized("m", matrix.to(dtype).to(device))
                if not all(torch.equal(bits(a), bits(b.cpu())) for a, b in zip(right, own, strict=True)):
                    problems.append(f"{rows} x {columns} of {dtype}, scale {scale:g}: other bits than on the CPU")
    name, large = "model.layers.0.mlp.up_proj.weight", (3072, 1024) if not tiny else (256, 128)
    bucket = [(name, torch.randn(*large, generator=generator).to(torch.bfloat16).to(device))] * (16 if not tiny else 1)
    forget_peak(device)
    took_s = seconds(lambda: to_fp8(bucket), device, times=5)
    size_bytes = sum(tensor.nbytes for _, tensor in bucket)
    return Measured({"bytes": size_bytes, "s": took_s, "bytes_per_s": size_bytes / took_s}, problems)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
