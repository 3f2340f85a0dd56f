"""File sizes and CRC-32 sums of a weight version: compares the files with the sums that the trainer announced.

A sum covers the whole file, header included. It takes a fraction of the time of the tensors' sha256 (`checksums.py`).
It detects accidents, not attacks: a process that can write the files can write other sums.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from messages import FileSum

_CHUNK: Final = 1 << 20  # bytes read at a time
_THREADS: Final = 4  # files read at a time


class RunningSum:
    """The sum of a file that is written in pieces."""

    def __init__(self) -> None:
        self._size = self._crc = 0

    def add(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._size += memoryview(data).nbytes
        self._crc = zlib.crc32(data, self._crc)

    @property
    def sum(self) -> FileSum:
        """The sum of all bytes so far."""
        return FileSum(size_bytes=self._size, crc32=self._crc)


def sum_of(file: Path) -> FileSum:
    """Compute the sum of a file.

    Raises:
        OSError: the file cannot be read.
    """
    running, room = RunningSum(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(room):
            running.add(room[:size])
    return running.sum


def damage_in(directory: Path, files: Mapping[str, FileSum]) -> str:
    """Describe the files in a directory that differ from their announced sums; empty if none does.

    Args:
        directory: may contain other files too.
        files: announced sums by name.
    """
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="sums") as executor:
        names = sorted(files)
        found = executor.map(_damage, [directory / name for name in names], [files[name] for name in names])
        return "; ".join(filter(None, found))


def _damage(file: Path, announced: FileSum) -> str:
    try:
        found = sum_of(file)
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror or error}"
    if found.size_bytes != announced.size_bytes:
        return f"{file}: has {found.size_bytes} bytes, {announced.size_bytes} were announced"
    if found.crc32 != announced.crc32:
        return f"{file}: damaged: its CRC-32 is {found.crc32:08x}, {announced.crc32:08x} was announced"
    return ""
