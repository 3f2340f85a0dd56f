"""Reads safetensors checkpoints: their files, headers and tensors. Tensors are memory-mapped one at a time."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from runtime.models.directory import ModelError, decoded, file_of, has_file, read

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
ADAPTER_FILE: Final = "adapter_model.safetensors"  # of peft
MAX_HEADER_BYTES: Final = 32 << 20  # of a file, or of an index; the format allows 100 MB, which takes gigabytes to read
MAX_TENSORS: Final = 500_000  # of a checkpoint; the largest known one has 140,000
METADATA: Final = "__metadata__"  # an entry of the header that is not a tensor
_LENGTH_BYTES: Final = 8  # of the header's length at the start of a file
ITEM_BYTES: Final = {  # bytes per number, by safetensors dtype
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    file: Path
    begin: int  # offset in the file
    size_bytes: int

    def data(self) -> memoryview:
        """Return the tensor's row-major bytes, memory-mapped."""
        if not self.size_bytes:
            return memoryview(b"")
        return np.memmap(self.file, dtype=np.uint8, mode="r", offset=self.begin, shape=(self.size_bytes,)).data


class StoredFile(NamedTuple):
    """A file of a checkpoint."""

    path: Path
    start: int  # offset of the first tensor: size of the header
    tensors: tuple[StoredTensor, ...]  # in file order


def safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one file, or the shards in its index.

    Raises:
        FileNotFoundError: the directory has neither a file nor an index, or a shard is missing.
        ValueError: the index is malformed, or a file is outside the directory.
    """
    if has_file(directory, INDEX_FILE):
        return sorted(set(shards_by_tensor(directory).values()))
    single = file_of(directory, SINGLE_FILE)
    if single is None:
        raise FileNotFoundError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    return [single]


def shards_by_tensor(directory: Path) -> dict[str, Path]:
    """The file of each tensor, from the index of a checkpoint.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the index is malformed, or names a file outside the directory.
    """
    weight_map = _weight_map(directory)
    files: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        try:
            found = file_of(directory, name)
        except ModelError as error:
            raise ModelError(f"{directory / INDEX_FILE}: {error}") from error
        if found is None:
            raise FileNotFoundError(f"{directory / name}: no such file, though {INDEX_FILE} names it")
        files[name] = found
    return {tensor: files[name] for tensor, name in weight_map.items()}


def tensor_names(directory: Path) -> Collection[str]:
    """The names of a checkpoint's tensors, from its index or its only file; none if the directory has no weights.

    Raises:
        ValueError: the index or the file is malformed.
    """
    if has_file(directory, INDEX_FILE):
        return _weight_map(directory).keys()
    single = file_of(directory, SINGLE_FILE)
    return () if single is None else [tensor.name for tensor in read_file(single).tensors]


def _weight_map(directory: Path) -> dict[str, str]:
    content = read(directory, INDEX_FILE, MAX_HEADER_BYTES)
    if content.count(b":") > 2 * MAX_TENSORS:  # before it is decoded
        raise ModelError(f"{directory / INDEX_FILE}: names more than {MAX_TENSORS:,} tensors")
    try:
        return decoded(content, _Index).weight_map
    except ValueError as error:
        raise ModelError(f"{directory / INDEX_FILE}: not an index of safetensors shards: {error}") from error


def read_files(directory: Path) -> list[StoredFile]:
    """Read the headers of a checkpoint's files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format, or is truncated; names the file.
    """
    found: list[StoredFile] = []
    num_tensors = 0
    for path in safetensors_files(directory):
        found.append(read_file(path))
        num_tensors += len(found[-1].tensors)
        if num_tensors > MAX_TENSORS:
            raise ModelError(f"{directory}: its weights have more than {MAX_TENSORS:,} tensors")
    return found


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name. Raises as `read_files` does."""
    return {tensor.name: tensor for file in read_files(directory) for tensor in file.tensors}


def read_file(file: Path) -> StoredFile:
    """Read the header of a file. Its tensors must cover the rest of the file without gaps.

    Raises:
        ValueError: the file is not in the safetensors format, or is truncated; names the file.
    """
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as opened:
            start = _LENGTH_BYTES + int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not _LENGTH_BYTES < start <= size_bytes:
                raise ValueError("no header")
            if start > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {start:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
            content = opened.read(start - _LENGTH_BYTES)
        tensors = sorted(_tensors(file, start, content), key=lambda tensor: (tensor.begin, tensor.name))
        _check_offsets(tensors, start, size_bytes)
    except ValueError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error
    return StoredFile(file, start, tuple(tensors))


class _Entry(msgspec.Struct, frozen=True):
    dtype: str = ""  # of a tensor, all three have a value
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] | None = None  # from the end of the header


def _tensors(file: Path, start: int, header: bytes) -> Iterator[StoredTensor]:
    if header.count(b"{") > MAX_TENSORS + 2:  # before it is decoded
        raise ValueError(f"its header names more than {MAX_TENSORS:,} tensors")
    for name, entry in decoded(header, dict[str, _Entry]).items():
        if name != METADATA:
            if entry.data_offsets is None or not entry.dtype:
                raise ValueError(f"{name} has no dtype or no data_offsets")
            begin, end = entry.data_offsets
            yield StoredTensor(name, entry.dtype, entry.shape, file, start + begin, end - begin)


def _check_offsets(tensors: list[StoredTensor], start: int, size_bytes: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.begin != end or tensor.size_bytes < 0:
            raise ValueError(f"{tensor.name} begins at byte {tensor.begin}, expected {end}")
        end += tensor.size_bytes
        if end > size_bytes:
            raise ValueError(f"shorter than its header says ({tensor.name})")
    if end != size_bytes:
        raise ValueError(f"has {size_bytes} bytes, but its header says {end}")
