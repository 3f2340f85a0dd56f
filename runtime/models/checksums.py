"""Checksums of weights by Hugging Face name. One string compares a trainer's files with an engine's tensors.

Algorithm, version 1. Every tensor has a header: the JSON text `["NAME","DTYPE",[SHAPE]]` without spaces. DTYPE is the
safetensors name ("F32", "BF16"). A tensor's checksum is sha256(header + newline + data), where data is its
little-endian, row-major bytes. The checksum of a set is sha256 over the tensors' checksums. Each of them is one
newline-terminated line of lower-case hex, in the code point order of the names.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.models.safetensors import read_tensors


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


def checksums_of(directory: Path) -> Checksums:
    """Checksums of the safetensors checkpoint in a directory, from its files alone.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not in the safetensors format, or is truncated.
    """
    return combined(
        {
            tensor.name: tensor_checksum(tensor.name, tensor.dtype, tensor.shape, tensor.data())
            for tensor in read_tensors(directory).values()
        }
    )
