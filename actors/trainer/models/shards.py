"""Safetensors files that are written tensor by tensor: what a file will hold is known before and stands first in it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from messages import FileSum
from runtime.checksums import INDEX_FILE, SINGLE_FILE, tensor_checksum
from runtime.weights.sums import RunningSum

SHARD_BYTES: Final = 5_000_000_000  # of tensors in a file
_DTYPES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
}


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    size_bytes: int


class Shard(NamedTuple):
    """A file and its tensors, in the order in which they are written."""

    file: str
    entries: Sequence[Entry]


def entry_of(name: str, tensor: Tensor) -> Entry:
    """What a file says of a tensor, which may be on the device "meta"."""
    return Entry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def cut_into_shards(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The tensors in their order, as many in a file as fit; a larger one alone."""
    shards: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not shards or size + entry.size_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size_bytes
    return shards


def named(shards: Sequence[Sequence[Entry]], *, before: int = 0, total: int | None = None) -> list[Shard]:
    """Files for shards.

    Args:
        shards: of this rank.
        before: files of ranks before this one.
        total: files of all ranks; none: there is no other rank.
    """
    total = len(shards) if total is None else total
    if total == 1:
        return [Shard(SINGLE_FILE, entries) for entries in shards]
    numbers = range(before + 1, before + len(shards) + 1)
    return [
        Shard(f"model-{number:05d}-of-{total:05d}.safetensors", entries)
        for number, entries in zip(numbers, shards, strict=True)
    ]


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """Say which file holds which tensor; of a single file that is not needed."""
    if len(shards) == 1:
        return
    size = sum(entry.size_bytes for shard in shards for entry in shard.entries)
    places = {entry.name: shard.file for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))


class ShardWriter:
    """Writes tensors one after the other, and computes their checksums and the files' on the way."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        """Nothing is written yet.

        Args:
            directory: exists.
            shards: every tensor that will be written, in this order.
        """
        self._directory = directory
        self._left = [(shard, list(reversed(shard.entries))) for shard in reversed(shards)]
        self._file: FileIO | None = None
        self._sum = RunningSum()
        self.checksums: dict[str, str] = {}  # by tensor
        self.files: dict[str, FileSum] = {}  # by name, of those that are complete

    def write(self, name: str, data: memoryview) -> Entry:
        """Write the next tensor; what the file says of it."""
        shard, entries = self._left[-1]
        entry = entries.pop()
        if (entry.name, entry.size_bytes) != (name, data.nbytes):
            raise ValueError(f"{name} of {data.nbytes} bytes came, not {entry.name} of {entry.size_bytes}")
        if self._file is None:
            self._file, self._sum = FileIO(self._directory / shard.file, "w"), RunningSum()
            self._write(self._file, memoryview(_header(shard.entries)))
        self._write(self._file, data)
        self.checksums[name] = tensor_checksum(name, entry.dtype, entry.shape, data)
        if not entries:
            os.fsync(self._file.fileno())  # by who wrote it: on a file system of several nodes no other can
            self.close()
            self.files[shard.file] = self._sum.sum
            self._left.pop()
        return entry

    def _write(self, file: FileIO, data: memoryview) -> None:
        self._sum.add(data)  # of what is in memory: what the disk makes of it is compared with that
        _write_all(file, data)

    def close(self) -> None:
        """Leave a file unfinished, if one is."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: FileIO, data: memoryview) -> None:
    """The system may take less at a time: on Linux 2 GiB."""
    while data:
        data = data[file.write(data) :]


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        offsets = (begin, begin + entry.size_bytes)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        begin = offsets[1]
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # the tensors lie aligned
    return len(encoded).to_bytes(8, "little") + encoded


def bytes_of(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor; of one on the CPU not a copy, if it is contiguous."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write whole tensors that are in memory: one file, or shards and their index."""
    shards = named(cut_into_shards([entry_of(name, tensor) for name, tensor in weights.items()]))
    writer = ShardWriter(directory, shards)
    for name, tensor in weights.items():
        writer.write(name, bytes_of(tensor))
    write_index(directory, shards)
