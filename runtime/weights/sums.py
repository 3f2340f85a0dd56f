"""Sizes and CRC-32 of the files of a version: what the trainer wrote, compared with the bytes that lie there now.

A sum is over a file as it lies there, header included. It takes a fraction of the time of the tensors' sha256
(`runtime/checksums.py`). It finds accidents, not intent: who can write there can also write another sum.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from messages import FileSum

_CHUNK: Final = 1 << 20  # bytes that are read at a time
_THREADS: Final = 4  # files that are read at a time


class RunningSum:
    """The sum of a file that is written piece by piece."""

    def __init__(self) -> None:
        self._size = self._crc = 0

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes of it."""
        self._size += memoryview(data).nbytes
        self._crc = zlib.crc32(data, self._crc)

    @property
    def sum(self) -> FileSum:
        """Of all bytes so far."""
        return FileSum(size_bytes=self._size, crc32=self._crc)


def sum_of(file: Path) -> FileSum:
    """The sum of a file as it lies there.

    Raises:
        OSError: it cannot be read.
    """
    running, room = RunningSum(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as opened:
        while size := opened.readinto(room):
            running.add(room[:size])
    return running.sum


def damage_in(directory: Path, files: Mapping[str, FileSum]) -> str:
    """What of a directory is not as it was announced, by the path of the file; empty when all of it is.

    Args:
        directory: may hold other files beside.
        files: by name.
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
