"""Weight versions in one directory, named like `v000007`: full files, or deltas."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runtime.models.delta import NOTE
from runtime.models.route import OnDisk
from runtime.util.files import write_atomically

_NAME: Final = re.compile(r"v(\d{6,})")


def name_of(version: int) -> str:
    """Return the directory name of a version."""
    return f"v{version:06d}"


def versions_in(root: Path) -> list[tuple[int, Path]]:
    """Return complete versions with their directories, oldest first."""
    return sorted((int(match[1]), path) for path in root.glob("v*") if (match := _NAME.fullmatch(path.name)))


def write_note(directory: Path, stored: OnDisk) -> None:
    """Write into a version's directory which files it has."""
    write_atomically(directory / NOTE, msgspec.json.encode(stored))


def on_disk(root: Path) -> list[OnDisk]:
    """Read the notes of the versions in a directory, oldest first. Versions without a note are left out."""
    return list(_read(root))


def _read(root: Path) -> Iterator[OnDisk]:
    for number, path in versions_in(root):
        try:
            stored = msgspec.json.decode((path / NOTE).read_bytes(), type=OnDisk)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # damaged, or being deleted: not usable for a route
            continue
        if stored.version.number == number:
            yield stored
