"""File sizes and CRC-32 sums of a weight version: compares the files with the sums that the trainer announced.

A sum covers the whole file, header included. It takes a fraction of the time of the tensors' sha256 (`checksums.py`).
It detects accidents, not attacks: a process that can write the files can write other sums.
Concurrent callers of one check share its result (`SharedLooks`).
"""

import zlib
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import anyio

from messages import FileSum
from runtime.util.threads import BoundedThreads

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


MAX_THREADS: Final = 2  # one reads; an abandoned one may still wait for the disk


class _Look:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.found: str | None = None  # none: it was cancelled


class SharedLooks:
    """Runs one check at a time. Calls during a check share the next one, which starts after all these calls."""

    def __init__(self) -> None:
        self._next: dict[Hashable, _Look] = {}  # checks that have not started
        self._reading = anyio.Lock()
        self._threads = BoundedThreads(MAX_THREADS)

    async def look(self, key: Hashable, read: Callable[[], str]) -> str:
        """Run `read` on a thread, started after this call, and return its result. Cancellation abandons the thread.

        Args:
            key: calls with the same key may share a check.
            read: the same function for all of them.
        """
        while True:
            look = self._next.get(key)
            if look is None:
                look = self._next[key] = _Look()
                await self._lead(key, look, read)
            else:
                await look.done.wait()
            if look.found is not None:
                return look.found

    async def _lead(self, key: Hashable, look: _Look, read: Callable[[], str]) -> None:
        try:
            async with self._reading:
                del self._next[key]
                look.found = await self._threads.run(read)
        finally:
            if self._next.get(key) is look:
                del self._next[key]
            look.done.set()
