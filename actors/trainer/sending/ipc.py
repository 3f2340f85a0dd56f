"""Buckets in shared memory of this machine, whose name the engines are told: on the CPU."""

import base64
import hashlib
import pickle
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from actors.trainer.sending.asking import Ask
from messages import BucketSent

SEGMENTS: Final = Path("/dev/shm")  # where Linux shows shared memory by name
HEADER_BYTES: Final = 64  # before the data in a segment, as torch has it; begins with a count of who has it
ENDLESS: Final = 1 << 20  # a count that never ends: else who finds that it is the last removes what is gone already


class Segments:
    """In shared memory of this machine, whose name they are told: on the CPU."""

    def __init__(self, prefix: str, readers: Mapping[str, int]) -> None:
        """Begin none.

        Args:
            prefix: of the names of segments, which no other session has.
            readers: ranks by engine.
        """
        self._prefix = prefix
        self._readers = readers

    def carry(self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float) -> Mapping[str, str]:
        """Write it there and tell them."""
        with segment(f"{self._prefix}-{step.stage}-{step.index}", flat, sum(self._readers.values())) as names:
            payloads = iter([payload_of(name, step, flat.nbytes) for name in names])
            by_engine = {
                engine: tuple(next(payloads) for _ in range(number)) for engine, number in self._readers.items()
            }
            told = msgspec.structs.replace(step, payloads=by_engine, segments=tuple(names))
            return ask(told, timeout_s).result()


@contextmanager
def segment(name: str, flat: Tensor, num_readers: int) -> Generator[list[str]]:
    """A segment with the bytes of a buffer, under a name for each reader, which removes it; here all are removed."""
    paths = [SEGMENTS / f"{name}-{reader}" for reader in range(num_readers)]
    try:
        with paths[0].open("wb") as file:
            file.write(struct.pack("<i", ENDLESS).ljust(HEADER_BYTES, b"\0"))
            file.write(flat.numpy().data)
        for path in paths[1:]:
            path.hardlink_to(paths[0])
        yield [path.name for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def segment_prefix(run_directory: Path) -> str:
    """How the names of a run's segments begin, and no other run's on this machine: names of runs may be equal."""
    return f"physarum-{hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]}"


def remove_segments(prefix: str) -> None:
    """Remove what a death has left."""
    for path in SEGMENTS.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


class Made:
    """Pickled as the call that makes something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = (function, arguments)

    def __reduce__(self) -> Any:
        return self._made


def payload_of(name: str, step: BucketSent, num_bytes: int) -> str:
    """What SGLang takes for a bucket in a segment: base64 of a pickle that names it, and where tensors are."""
    held = Made(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", f"/{name}".encode(), num_bytes)
    typed = Made(reductions.rebuild_typed_storage, held, torch.uint8)
    tensor = Made(reductions.rebuild_tensor, Tensor, typed, (0, (num_bytes,), (1,), False))
    return bucket_payload(tensor, step)


def bucket_payload(tensor: Made, step: BucketSent) -> str:
    """A bucket for SGLang: what makes the tensor of its bytes, and where the others lie in it."""
    return base64.b64encode(pickle.dumps({"flattened_tensor": tensor, "metadata": places_of(step)})).decode()


def places_of(step: BucketSent) -> list[SimpleNamespace]:
    """Where each tensor of a bucket lies, as SGLang describes it."""
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in step.dtypes]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(step.shapes, dtypes, strict=True)]
    return [
        SimpleNamespace(name=name, shape=torch.Size(shape), dtype=dtype, start_idx=end - size, end_idx=end, numel=size)
        for name, dtype, shape, size, end in zip(step.names, dtypes, step.shapes, sizes, accumulate(sizes), strict=True)
    ]
