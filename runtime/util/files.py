"""Atomic and durable writes of files and directories; the user's directories for a cache and for state.

Standard library only, because set-up imports it too.
"""

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE_FILE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700
STDOUT: Final = Path("-")


def user_cache(name: str) -> Path:
    """Return a directory of this user for files that may be removed at any time. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "physarum" / name


def user_state(name: str) -> Path:
    """Return a directory of this user for files that outlive a run and are of this machine. It may not exist yet.

    Raises:
        OSError: this user has no home.
    """
    chosen = os.environ.get("XDG_STATE_HOME", "")
    try:
        place = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".local" / "state"
        return place / "physarum" / name
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} HOME and XDG_STATE_HOME are not set") from error


@contextmanager
def atomic_file(path: Path, mode: int = PRIVATE_FILE) -> Generator[BinaryIO]:
    """Write a file atomically: it replaces `path` when the block ends, and is removed if the block raises.

    Readers, and a start after a crash, see either the old or the new content. By default only its owner can read it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # a crash may have left it, with another mode
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        complete(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PRIVATE_FILE) -> None:
    """Replace a file atomically."""
    with atomic_file(path, mode) as file:
        file.write(content)


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user names: through links, into devices and pipes, or to standard output for "-"."""
    if path == STDOUT:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with place.open("wb") as file:
            file.write(content)
    else:
        write_atomically(place, content)


def complete(partial: Path, path: Path) -> None:
    """Move a fully written file to its final path, durably: data and name survive a power failure."""
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Generator[Path]:
    """Write a directory atomically: yield a hidden directory that becomes `path` when the block ends.

    It is removed if the block raises. A crash leaves it, and the next writer removes it.

    Raises:
        OSError: a non-empty directory of that name exists at the end of the block.
    """
    partial = begin_directory(path)
    try:
        yield partial
        complete_directory(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def begin_directory(path: Path) -> Path:
    """Create the hidden directory in which a directory is written, and remove what a crash left in its place."""
    partial = hidden_name(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(PRIVATE_DIRECTORY, parents=True)
    return partial


def hidden_name(path: Path) -> Path:
    """Return where a directory is written before it gets its name: next to it, with a dot in front."""
    return path.with_name(f".{path.name}")


def complete_directory(partial: Path, path: Path) -> None:
    """Move a fully written directory to its final path, durably: all its content survives a power failure.

    Only the owner can access the directory and its files.

    Raises:
        OSError: a non-empty directory of that name exists.
    """
    for folder, _, names in os.walk(partial, topdown=False):
        for name in names:
            os.chmod(Path(folder, name), PRIVATE_FILE)
            _sync(Path(folder, name))
        os.chmod(folder, PRIVATE_DIRECTORY)
        _sync(Path(folder))
    partial.replace(path)
    _sync(path.parent)


def path_inside(directory: Path, name: str) -> Path:
    """Resolve a file name found in another file of a directory. Links must not lead out of the directory.

    The exception is Hugging Face's cache, where `snapshots/<revision>` holds links to the neighbouring `blobs`.

    Raises:
        ValueError: the name is not a relative path, or the path leaves the directory.
        OSError: its links form a cycle.
    """
    root = os.path.realpath(directory)
    found = os.path.realpath(os.path.join(root, name), strict=False)
    allowed = [root]
    if os.path.basename(os.path.dirname(root)) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
    is_plain = name and not os.path.isabs(name) and ".." not in Path(name).parts
    if not is_plain or not any(found.startswith(f"{place}{os.sep}") for place in allowed):
        raise ValueError(f"{name!r} leads out of {directory}, to {found}: files are read from that directory alone")
    return directory / name


def append_line(path: Path, line: bytes) -> None:
    """Append a line durably. After a crash in the middle of a write, the line lacks its end."""
    new = not path.exists()
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
