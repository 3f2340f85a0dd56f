"""Versions of weights that lie in one directory, `v000007` each: whole files, or what changed since the one before."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runtime.files import write_atomically
from runtime.weights.delta import NOTE
from runtime.weights.route import OnDisk

_NAME: Final = re.compile(r"v(\d{6,})")


def name_of(version: int) -> str:
    """How the directory of a version is called."""
    return f"v{version:06d}"


def versions_in(root: Path) -> list[tuple[int, Path]]:
    """Complete versions with their directories, oldest first."""
    return sorted((int(match[1]), path) for path in root.glob("v*") if (match := _NAME.fullmatch(path.name)))


def write_note(directory: Path, stored: OnDisk) -> None:
    """Say in the directory of a version what lies there."""
    write_atomically(directory / NOTE, msgspec.json.encode(stored))


def on_disk(root: Path) -> list[OnDisk]:
    """What the versions in a directory say of themselves, oldest first; those that say nothing are left out."""
    return list(_read(root))


def _read(root: Path) -> Iterator[OnDisk]:
    for number, path in versions_in(root):
        try:
            stored = msgspec.json.decode((path / NOTE).read_bytes(), type=OnDisk)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # damaged, or going: no way leads over it
            continue
        if stored.version.number == number:
            yield stored
