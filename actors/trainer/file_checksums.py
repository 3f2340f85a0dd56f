"""Checksums of checkpoint files: written with the checkpoint, compared before it is read.

`checksums.json` lists every other file of the directory with its size and sha256. It is written last.
"""

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from runtime.models.checkpoint_files import CHECKSUMS_FILE, Checksums, FileChecksum, checksum_of
from runtime.models.directory import has_file, read_json
from runtime.util.files import path_inside

_MAX_THREADS: Final = 8  # threads that hash one checkpoint's files
_LOOK_AGAIN_S: Final = 0.2


def write_checksums(directory: Path, known: Mapping[str, FileChecksum]) -> None:
    """Write `checksums.json` for a directory.

    Args:
        directory: directory whose other files are complete.
        known: checksums that are already computed; the other files are hashed here.
    """
    names = sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    files = {name: known.get(name) or checksum_of(directory / name) for name in names}
    (directory / CHECKSUMS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(Checksums(files))))


def absent_files(directory: Path, expected: Mapping[str, FileChecksum], wait_s: float) -> list[str]:
    """Return the files that are not in a directory with their sizes. A network file system may show them late.

    Args:
        directory: directory of the checkpoint.
        expected: size and sha256 of each file as its rank wrote it.
        wait_s: seconds to wait for the last file.
    """
    deadline = time.monotonic() + wait_s
    while absent := [name for name, each in expected.items() if _size_of(directory / name) != each.size_bytes]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_AGAIN_S)
    return sorted(absent)


def _size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def damage_of(directory: Path, *, thorough: bool) -> str | None:
    """Describe the damage to a checkpoint's files. Returns None if there is none.

    Args:
        directory: directory of the checkpoint.
        thorough: hash every file; otherwise compare only sizes.

    Raises:
        OSError: a file cannot be opened, which does not imply damage.
    """
    try:
        if not has_file(directory, CHECKSUMS_FILE):
            return f"{CHECKSUMS_FILE} is missing"
        listed = read_json(directory, CHECKSUMS_FILE, Checksums).files
        for name in listed:
            path_inside(directory, name)
    except ValueError as error:
        return f"{CHECKSUMS_FILE} cannot be read: {error}"
    for name, expected in listed.items():
        size_bytes = _size_of(directory / name)
        if size_bytes is None:
            return f"{name} is missing"
        if size_bytes != expected.size_bytes:
            return f"{name} has {size_bytes} bytes, and {expected.size_bytes} were written"
    return _changed(directory, listed.items()) if thorough else None


def _changed(directory: Path, listed: Iterable[tuple[str, FileChecksum]]) -> str | None:
    """Describe the first file whose sha256 differs from the recorded one. None: all match."""

    def compare(item: tuple[str, FileChecksum]) -> str | None:
        name, expected = item
        is_same = checksum_of(directory / name).sha256 == expected.sha256
        return None if is_same else f"the sha256 of {name} differs from the one recorded when it was written"

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as executor:
        return next(filter(None, executor.map(compare, listed)), None)
