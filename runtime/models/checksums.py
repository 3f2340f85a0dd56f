"""Checksums of weights: of files, by Hugging Face name, and of an engine's own tensors, as SGLang reports them.

Algorithm, version 1. Every tensor has a header: the JSON text `["NAME","DTYPE",[SHAPE]]` without spaces. DTYPE is the
safetensors name ("F32", "BF16"). A tensor's checksum is sha256(header + newline + data), where data is its
little-endian, row-major bytes. The checksum of a set is sha256 over the tensors' checksums. Each of them is one
newline-terminated line of lower-case hex, in the code point order of the names.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from runtime.models.directory import file_of, has_file
from runtime.models.safetensors import ADAPTER_FILE, INDEX_FILE, SINGLE_FILE, read_file, read_tensors


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


DIGITS: Final = 8  # of each tensor in `digits_of`


def rank_checksum(checksums: Mapping[str, str]) -> str:
    """Combine the checksums of the tensors that one rank of an engine holds, like SGLang's `per_gpu_checksum`."""
    return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def engine_checksum(ranks: Iterable[Mapping[str, str]]) -> str:
    """Combine the checksums of an engine's ranks, like SGLang's `per_engine_checksum`."""
    return hashlib.sha256("".join(map(rank_checksum, ranks)).encode()).hexdigest()


def digits_of(ranks: Sequence[Mapping[str, str]]) -> str:
    """Shorten the checksums of an engine's tensors to a few digits each, in the order of their names.

    They show which tensor differs; `engine_checksum` shows whether one does.
    """
    names = sorted({name for rank in ranks for name in rank})
    joined = ("".join(rank.get(name, "") for rank in ranks) for name in names)
    return "".join(hashlib.sha256(each.encode()).hexdigest()[:DIGITS] for each in joined)


def checksums_of(directory: Path) -> Checksums:
    """Checksums of the safetensors checkpoint in a directory, or else of peft's adapter there, from its files alone.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format, or is truncated.
    """
    is_model = has_file(directory, SINGLE_FILE) or has_file(directory, INDEX_FILE)
    adapter = None if is_model else file_of(directory, ADAPTER_FILE)
    tensors = read_tensors(directory).values() if adapter is None else read_file(adapter).tensors
    return combined({each.name: tensor_checksum(each.name, each.dtype, each.shape, each.data()) for each in tensors})
