"""Files and directories that are there whole or not at all, and stay. Standard library only: set-up loads it too."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

PRIVATE_FILE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700


@contextmanager
def whole(path: Path, mode: int = PRIVATE_FILE) -> Generator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends and is gone when the block raises.

    Readers, and a start after a crash, see the old content or the new. Others than its owner never do.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        complete(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes, mode: int = PRIVATE_FILE) -> None:
    """Replace a file at once."""
    with whole(path, mode) as file:
        file.write(content)


def complete(partial: Path, path: Path) -> None:
    """Give a file that is fully written its name; both outlast a power cut."""
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def complete_directory(partial: Path, path: Path) -> None:
    """Give a directory that is fully written its name; with all that is in it, it outlasts a power cut.

    It and its files are its owner's alone.

    Raises:
        OSError: there is a directory of that name that is not empty.
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
    """The path of a file that another file of a directory names. Links may not lead out of the directory.

    Hugging Face's cache is the exception: its `snapshots/<revision>` are links to `blobs` beside them.

    Raises:
        ValueError: it is not a name, or the path leaves the directory.
        OSError: its links go in a circle.
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
    """Append a line that outlasts a power cut; one that is cut off half-way lacks its end."""
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
