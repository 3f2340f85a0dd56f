"""Sending of buckets in named shared memory of this machine, on the CPU."""

import base64
import hashlib
import pickle
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from actors.trainer.weights.calls import Ask
from messages import BucketSent

SEGMENTS: Final = Path("/dev/shm")  # where Linux shows shared memory by name
HEADER_BYTES: Final = 64  # before the data of a segment, as in torch; starts with a reference count
ENDLESS: Final = 1 << 20  # a reference count that never reaches zero: the last reader would unlink a name that is gone


class Segments:
    """Sends buckets in shared-memory segments. The engines receive the names of the segments."""

    def __init__(self, prefix: str, readers: Mapping[str, int]) -> None:
        """Prepare to send, without a segment yet.

        Args:
            prefix: prefix of the segments' names, unique to this weight sync.
            readers: number of ranks by engine.
        """
        self._prefix = prefix
        self._readers = readers

    def carry(
        self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float, meanwhile: Callable[[], None]
    ) -> Mapping[str, str]:
        """Write a bucket to a segment, and have the engines load it."""
        with segment(f"{self._prefix}-{step.stage}-{step.index}", flat, sum(self._readers.values())) as names:
            payloads = iter([payload_of(name, step, flat.nbytes) for name in names])
            by_engine = {
                engine: tuple(next(payloads) for _ in range(number)) for engine, number in self._readers.items()
            }
            addressed = msgspec.structs.replace(step, payloads=by_engine, segments=tuple(names))
            taken = ask(addressed, timeout_s)
            meanwhile()
            return taken.result()


@contextmanager
def segment(name: str, flat: Tensor, num_readers: int) -> Generator[list[str]]:
    """Create a segment from a buffer, with one name per reader.

    Each reader removes its name. The end of the block removes the remaining names.
    """
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
    """Return the name prefix of a run's segments, unique on this machine: two runs may have the same name."""
    return f"physarum-{hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]}"


def remove_segments(prefix: str) -> None:
    """Remove segments that a crash left behind."""
    for path in SEGMENTS.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


class PickledCall:
    """Pickles as the call that creates an object."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = (function, arguments)

    def __reduce__(self) -> Any:
        return self._made


def payload_of(name: str, step: BucketSent, num_bytes: int) -> str:
    """Encode a bucket for SGLang: base64 of a pickle that has the segment's name and the places of the tensors."""
    held = PickledCall(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", f"/{name}".encode(), num_bytes)
    typed = PickledCall(reductions.rebuild_typed_storage, held, torch.uint8)
    tensor = PickledCall(reductions.rebuild_tensor, Tensor, typed, (0, (num_bytes,), (1,), False))
    return bucket_payload(tensor, step)


def bucket_payload(tensor: PickledCall, step: BucketSent) -> str:
    """Encode a bucket for SGLang: a call that rebuilds its bytes, and the places of the tensors in them."""
    return base64.b64encode(pickle.dumps({"flattened_tensor": tensor, "metadata": places_of(step)})).decode()


def places_of(step: BucketSent) -> list[SimpleNamespace]:
    """Describe the place of each tensor in a bucket, in SGLang's format."""
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in step.dtypes]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(step.shapes, dtypes, strict=True)]
    return [
        SimpleNamespace(name=name, shape=torch.Size(shape), dtype=dtype, start_idx=end - size, end_idx=end, numel=size)
        for name, dtype, shape, size, end in zip(step.names, dtypes, step.shapes, sizes, accumulate(sizes), strict=True)
    ]
