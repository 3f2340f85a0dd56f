"""Checksums of weights by Hugging Face name. One string compares a trainer's files with an engine's tensors.

Algorithm, version 1. Every tensor has a header: the JSON text `["NAME","DTYPE",[SHAPE]]` without spaces. DTYPE is the
safetensors name ("F32", "BF16"). A tensor's checksum is sha256(header + newline + data), where data is its
little-endian, row-major bytes. The checksum of a set is sha256 over the tensors' checksums. Each of them is one
newline-terminated line of lower-case hex, in the code point order of the names.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.util.files import path_inside

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format


class Checksums(NamedTuple):
    """Checksums of a set of weights, as lower-case hex."""

    tensors: dict[str, str]  # by tensor name
    total: str


def tensor_checksum(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Checksum of one tensor. `dtype` is the safetensors name; `data` is row-major and little-endian."""
    digest = hashlib.sha256(_header(name, dtype, shape))
    digest.update(data)
    return digest.hexdigest()


def fingerprint(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Like `tensor_checksum`, by crc32. About ten times as fast, but only tells tensors apart; it verifies nothing."""
    return f"{zlib.crc32(data, zlib.crc32(_header(name, dtype, shape))):08x}"


def _header(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    return json.dumps([name, dtype, list(shape)], separators=(",", ":")).encode() + b"\n"


def combined(tensors: Mapping[str, str]) -> Checksums:
    """Combine the checksums of single tensors, by name, into the checksum of the set."""
    ordered = dict(sorted(tensors.items()))
    digest = hashlib.sha256("".join(f"{checksum}\n" for checksum in ordered.values()).encode())
    return Checksums(tensors=ordered, total=digest.hexdigest())


def safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one file, or the shards in its index.

    Raises:
        FileNotFoundError: the directory has neither a file nor an index, or a shard is missing.
        ValueError: the index is malformed, or a file is outside the directory.
    """
    if (directory / INDEX_FILE).is_file():
        return sorted(set(shards_by_tensor(directory).values()))
    if not (directory / SINGLE_FILE).is_file():
        raise FileNotFoundError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    return [path_inside(directory, SINGLE_FILE)]


def shards_by_tensor(directory: Path) -> dict[str, Path]:
    """The file of each tensor, from the index of a checkpoint.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the index is malformed, or names a file outside the directory.
    """
    index = path_inside(directory, INDEX_FILE)
    try:
        weight_map: dict[str, Any] = dict(json.loads(index.read_bytes())["weight_map"].items())
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("weight_map names files by their names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors shards: {error!r}") from error
    files: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        try:
            files[name] = path_inside(directory, name)
        except ValueError as error:
            raise ValueError(f"{index}: {error}") from error
        if not files[name].is_file():
            raise FileNotFoundError(f"{files[name]}: named by {INDEX_FILE} and missing")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def checksums_of(directory: Path) -> Checksums:
    """Checksums of the safetensors checkpoint in a directory, from its files alone.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format.
    """
    tensors: dict[str, str] = {}
    for file in safetensors_files(directory):
        tensors.update(_file_checksums(file))
    return combined(tensors)


class StoredTensor(NamedTuple):
    """Location of a tensor in a safetensors file."""

    file: Path
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    begin: int  # offset of its bytes in the file
    end: int

    @property
    def data(self) -> NDArray[np.uint8]:
        """Its bytes, memory-mapped."""
        if self.begin == self.end:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(self.file, dtype=np.uint8, mode="r", offset=self.begin, shape=(self.end - self.begin,))


def tensors_in(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors checkpoint in a directory, from the headers of its files.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format, or is truncated.
    """
    return {name: tensor for file in safetensors_files(directory) for name, tensor in _tensors_of(file)}


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        try:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, dict[str, Any]] = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                if not begin <= end <= size_bytes:
                    raise ValueError(f"shorter than its header says ({name})")
                yield name, StoredTensor(file, entry["dtype"], tuple(entry["shape"]), begin, end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not a safetensors file: {error!r}") from error


def _file_checksums(file: Path) -> Iterator[tuple[str, str]]:
    data = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else np.empty(0, dtype=np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        if len(data) < 8 or start > min(len(data), MAX_HEADER_BYTES):
            raise ValueError("no header")
        header: dict[str, dict[str, Any]] = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            if not start <= begin <= end <= len(data):
                raise ValueError(f"shorter than its header says ({name})")
            yield name, tensor_checksum(name, entry["dtype"], entry["shape"], data[begin:end].data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error!r}") from error
