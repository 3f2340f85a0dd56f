"""Disk space: detect a full disk, and report the path and the required bytes in one line."""

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_TEXTS: Final = tuple(os.strerror(number) for number in FULL)
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
