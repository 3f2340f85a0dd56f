"""Safetensors files that are written tensor by tensor. The header is known in advance and written first."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from messages import FileSum
from runtime.models.checksums import tensor_checksum
from runtime.models.file_sums import RunningSum
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE, read_files, safetensors_files

SHARD_BYTES: Final = 5_000_000_000  # maximum bytes of tensors in a file
_DTYPES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
}


class Entry(NamedTuple):
    """Metadata of a tensor in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    size_bytes: int


class Shard(NamedTuple):
    """A file and its tensors, in write order."""

    file: str
    entries: Sequence[Entry]


def entry_of(name: str, tensor: Tensor) -> Entry:
    """Describe a tensor for a file's header. The tensor may be on the device "meta"."""
    return Entry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def cut_into_shards(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Distribute tensors over files in their order, up to SHARD_BYTES per file. A larger tensor gets its own file."""
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
    """Name the files of this rank's shards.

    Args:
        shards: shards of this rank.
        before: number of files of the ranks before this one.
        total: number of files of all ranks; None: this rank writes all files.
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
    """Write the index that maps tensors to files. A single file needs none."""
    if len(shards) == 1:
        return
    size = sum(entry.size_bytes for shard in shards for entry in shard.entries)
    places = {entry.name: shard.file for shard in shards for entry in shard.entries}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))


class ShardWriter:
    """Writes tensors one after another, and computes the checksums of tensors and files meanwhile."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        """Plan the files, without opening one.

        Args:
            directory: existing directory.
            shards: every tensor to write, in this order.
        """
        self._directory = directory
        self._left = [(shard, list(reversed(shard.entries))) for shard in reversed(shards)]
        self._file: FileIO | None = None
        self._sum = RunningSum()
        self.checksums: dict[str, str] = {}  # by tensor
        self.files: dict[str, FileSum] = {}  # by name, of complete files

    def write(self, name: str, data: memoryview) -> Entry:
        """Write the next tensor and return its entry.

        Raises:
            ValueError: another tensor is next.
        """
        shard, entries = self._left[-1]
        entry = entries.pop()
        if (entry.name, entry.size_bytes) != (name, data.nbytes):
            raise ValueError(
                f"received {name} of {data.nbytes} bytes; expected {entry.name} of {entry.size_bytes} bytes"
            )
        if self._file is None:
            self._file, self._sum = FileIO(self._directory / shard.file, "w"), RunningSum()
            self._write(self._file, memoryview(_header(shard.entries)))
        self._write(self._file, data)
        self.checksums[name] = tensor_checksum(name, entry.dtype, entry.shape, data)
        if not entries:
            os.fsync(self._file.fileno())  # the writer has to: on a shared file system no other node can
            self.close()
            self.files[shard.file] = self._sum.sum
            self._left.pop()
        return entry

    def _write(self, file: FileIO, data: memoryview) -> None:
        self._sum.add(data)  # of the bytes in memory: files are compared with that sum
        _write_all(file, data)

    def close(self) -> None:
        """Close the current file, which stays unfinished."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: FileIO, data: memoryview) -> None:
    """Write all bytes. One system call may write fewer: on Linux at most 2 GiB."""
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
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors
    return len(encoded).to_bytes(8, "little") + encoded


class Added(NamedTuple):
    """A tensor to add to a model directory."""

    entry: Entry
    data: Callable[[], memoryview]  # its row-major bytes


def add_tensors(directory: Path, tensors: Sequence[Added]) -> None:
    """Add tensors to a model directory: in files of their own, named in the index."""
    present = [[Entry(*tensor[:3], tensor.size_bytes) for tensor in file.tensors] for file in read_files(directory)]
    added = cut_into_shards(tensor.entry for tensor in tensors)
    shards = named([*present, *added])
    for path, shard in zip(safetensors_files(directory), shards[: len(present)], strict=True):
        path.rename(directory / shard.file)
    writer = ShardWriter(directory, shards[len(present) :])
    for tensor in tensors:
        writer.write(tensor.entry.name, tensor.data())
    write_index(directory, shards)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the row-major bytes of a tensor. A contiguous tensor on the CPU is not copied."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def write_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write full tensors from memory: one file, or shards and their index."""
    shards = named(cut_into_shards([entry_of(name, tensor) for name, tensor in weights.items()]))
    writer = ShardWriter(directory, shards)
    for name, tensor in weights.items():
        writer.write(name, bytes_of(tensor))
    write_index(directory, shards)
