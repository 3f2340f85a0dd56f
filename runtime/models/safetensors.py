"""Tensors of safetensors files, memory-mapped one at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from runtime.models.checksums import MAX_HEADER_BYTES, safetensors_files

ITEM_BYTES: Final = {  # bytes per number, by safetensors dtype
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    file: Path
    begin: int  # offset in the file
    size_bytes: int

    def data(self) -> memoryview:
        """Return its row-major bytes, memory-mapped."""
        if not self.size_bytes:
            return memoryview(b"")
        return np.memmap(self.file, dtype=np.uint8, mode="r", offset=self.begin, shape=(self.size_bytes,)).data


class StoredFile(NamedTuple):
    """A file of a checkpoint."""

    path: Path
    start: int  # offset of the first tensor: size of the header
    tensors: tuple[StoredTensor, ...]  # in file order


def read_files(directory: Path) -> list[StoredFile]:
    """Read the headers of a checkpoint's files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format; names the file.
    """
    return [_read(file) for file in safetensors_files(directory)]


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name. Raises as `read_files` does."""
    return {tensor.name: tensor for file in read_files(directory) for tensor in file.tensors}


def _read(file: Path) -> StoredFile:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        text = opened.read(min(size, MAX_HEADER_BYTES))
    try:
        tensors = sorted(_tensors(file, 8 + size, json.loads(text)), key=lambda tensor: (tensor.begin, tensor.name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error!r}") from error
    end = 8 + size
    for tensor in tensors:
        if tensor.begin != end:
            raise ValueError(f"{file}: {tensor.name} begins at byte {tensor.begin}, not at {end}")
        end += tensor.size_bytes
    if end != file.stat().st_size:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, its header says {end}")
    return StoredFile(file, 8 + size, tuple(tensors))


def _tensors(file: Path, start: int, header: dict[str, Any]) -> Iterator[StoredTensor]:
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, start + begin, end - begin)
