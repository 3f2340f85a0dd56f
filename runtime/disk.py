"""A full disk: noticed before it is, and told in one line with the path and the bytes that are needed."""

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
    """A disk is full; the text is written for people."""


def no_space(path: Path | str, needed_bytes: int | None = None) -> NoSpace:
    """The error for what cannot be written.

    Args:
        path: of the file or directory.
        needed_bytes: for all of it; none: unknown.
    """
    with suppress(OSError):
        free = f"{free_bytes(path):,} bytes free"
        needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes needed, "
        return NoSpace(f"no space left on the disk for {path}: {needed}{free}; {REMEDY}")
    return NoSpace(f"no space left on the disk for {path}; {REMEDY}")


def no_space_of(error: BaseException, path: Path | str) -> NoSpace:
    """The same for an error that `is_full`; the path is used where the error names none."""
    if isinstance(error, NoSpace):
        return error
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
    return no_space(named or path)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk or a quota is full, itself or in words: some libraries drop the number."""
    if isinstance(error, NoSpace) or (isinstance(error, OSError) and error.errno in FULL):
        return True
    return any(text in str(error) for text in _TEXTS)


def free_bytes(path: Path | str) -> int:
    """Bytes that this user may write below a directory, or the nearest that exists above it; no bound where unknown.

    Raises:
        OSError: it cannot be asked.
    """
    place = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize  # some network disks tell no size


def stored_bytes(directory: Path) -> int:
    """Bytes of the files below a directory, which may come and go meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):  # passes over folders that are gone
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


@contextmanager
def writing(path: Path, needed_bytes: int | None) -> Generator[None]:
    """Write something in the block.

    Args:
        path: of what is written, for the message.
        needed_bytes: for all of it; none: unknown, and only what says so itself is an error of a full disk.

    Raises:
        NoSpace: the disk was too small for it, also where a library says something else of that.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError("unexpected pos 704 vs 598")
        needed_now = needed_bytes if isinstance(error, RuntimeError) else None
        if is_full(error) or (needed_now is not None and free_bytes(path) < needed_now):
            raise no_space(path, needed_bytes) from error
        raise


class LinesWhileRoom:
    """A log file whose lines are dropped while they cannot be written: a full disk ends no process by its log."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """As of a file."""
        with suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As of a file."""
        with suppress(OSError):
            self._file.flush()

    def isatty(self) -> bool:
        """As of a file."""
        return False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
