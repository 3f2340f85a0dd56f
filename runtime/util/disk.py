"""Disk space: detect a full disk or watch for it, and report the path and the required bytes in one line."""

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import anyio
import structlog

from runtime.util.threads import BoundedThreads

log = structlog.get_logger()

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_TEXTS: Final = tuple(os.strerror(number) for number in FULL)
LOOK_EVERY_S: Final = 1.0
DISK_TIMEOUT_S: Final = 5.0
REMEDY: Final = "free some, and the same command continues the run"


class NoSpace(OSError):
    """A disk is full. The text is a message for users."""


def no_space(path: Path | str, needed_bytes: int | None = None) -> NoSpace:
    """The error for a path that cannot be written.

    Args:
        path: file or directory.
        needed_bytes: total size to write; None: unknown.
    """
    with suppress(OSError):
        free = f"{free_bytes(path):,} bytes free"
        needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes needed, "
        return NoSpace(f"no space left on the disk for {path}: {needed}{free}; {REMEDY}")
    return NoSpace(f"no space left on the disk for {path}; {REMEDY}")


def no_space_of(error: BaseException, path: Path | str) -> NoSpace:
    """The error for an exception that `is_full`. `path` is used if the exception names no file."""
    if isinstance(error, NoSpace):
        return error
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
    return no_space(named or path)


def is_full(error: BaseException) -> bool:
    """Whether an error reports a full disk or quota, by errno or by text: some libraries drop the errno."""
    if isinstance(error, NoSpace) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    return any(text in str(error) for text in _TEXTS)


def free_bytes(path: Path | str) -> int:
    """Bytes that this user may write below a directory, or below its nearest existing parent. No bound if unknown.

    Raises:
        OSError: the file system cannot be queried.
    """
    place = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # some network disks report no size


def stored_bytes(directory: Path) -> int:
    """Total bytes of the files below a directory. Files may appear and disappear meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):  # skips folders that disappear
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


class DiskWatch:
    """Measures the free bytes of one disk.

    Args:
        run_dir: directory on the disk.
        store: directory of the bus on it.
        min_free_bytes: below these the run stops.
        stream_bytes: size that the streams of the bus may reach, for the error: a next start needs their rest too.
        timeout_s: seconds after which the free bytes of a disk that does not answer count as unknown.
    """

    def __init__(
        self, run_dir: Path, store: Path, *, min_free_bytes: int, stream_bytes: int, timeout_s: float = DISK_TIMEOUT_S
    ) -> None:
        self._run_dir, self._store = run_dir, store
        self._min_free_bytes = min_free_bytes
        self._stream_bytes = stream_bytes
        self._timeout_s = timeout_s
        self._threads = BoundedThreads(1)

    async def until_low(self) -> NoSpace:
        """Wait until the disk has too few free bytes; return the error that says how many a start needs."""
        while True:
            if (free := await self._free_bytes()) < self._min_free_bytes:
                break
            await anyio.sleep(LOOK_EVERY_S)
        needed = self._min_free_bytes + max(0, self._stream_bytes - stored_bytes(self._store))
        log.error("no_space", free_bytes=free, needed_bytes=needed)
        return no_space(self._run_dir, needed)

    async def _free_bytes(self) -> int:
        """Return the free bytes of the disk; sys.maxsize while it does not answer."""
        try:
            with anyio.fail_after(self._timeout_s):  # a network disk may hang, the event loop must not
                return await self._threads.run(partial(free_bytes, self._run_dir))
        except OSError as error:  # a TimeoutError is one
            log.warning("disk_unknown", path=str(self._run_dir), reason=str(error) or "no answer")
            return sys.maxsize


@contextmanager
def writing(path: Path, needed_bytes: int | None) -> Generator[None]:
    """Turn errors of a full disk in the block into NoSpace.

    Args:
        path: target of the write, for the error text.
        needed_bytes: total size to write. None: unknown; only errors that report a full disk then count as such.

    Raises:
        NoSpace: the disk is too small, even if a library raises another error for it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError("unexpected pos 704 vs 598")
        needed_now = needed_bytes if isinstance(error, RuntimeError) else None
        if is_full(error) or (needed_now is not None and free_bytes(path) < needed_now):
            raise no_space(path, needed_bytes) from error
        raise


class LinesWhileRoom:
    """A log file that drops lines which it cannot write, so that a full disk ends no process by its log."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write like a file; drop the text if the write fails."""
        with suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush like a file; ignore a failure."""
        with suppress(OSError):
            self._file.flush()

    def isatty(self) -> bool:
        """Always false."""
        return False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
