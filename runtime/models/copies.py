"""A node's local copies of weight versions, made from published full files, or from deltas to an existing copy.

A copy is made under a hidden name, and renamed once it is complete, hashed and on disk. So a crash leaves the existing
copies usable. Checksums find damage in a copy or in the published files; then the copy is made again from full
files.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from messages import FileSum
from runtime.models.checksums import checksums_of
from runtime.models.delta import INDEX, NOTE, DeltaError, Version, apply_deltas, held_in, write_held
from runtime.models.file_sums import damage_in
from runtime.models.manifest import MANIFEST
from runtime.models.versions import name_of, on_disk, route_to, versions_in
from runtime.util.files import atomic_directory

KEEP_COPIES: Final = 2  # the newest, and one that an engine may still be reading


class CopyFailed(Exception):
    """A version cannot be copied. The message names file and tensor if they are known."""

    def __init__(self, reason: str, *, unusable: bool = False) -> None:
        super().__init__(reason)
        self.unusable = unusable  # the published files differ from their announcement


def make_copy(
    wanted: Version,
    published: Path,
    copies: Path,
    *,
    doubted: bool = False,
    files: Mapping[str, FileSum] = MappingProxyType({}),
    links: bool = False,
) -> Path:
    """Return the directory of a full copy of a version; make the copy if needed. One call at a time.

    Args:
        wanted: the version.
        published: its directory, next to those of other versions.
        copies: directory of this node's copies.
        doubted: hash an existing copy, because an engine that read it did not verify.
        files: announced sums by name, to check an existing copy.
        links: `published` is this node's own, so a file of a full version is a further name of it.

    Raises:
        CopyFailed: the copy cannot be made.
    """
    place = copies / name_of(wanted.number)
    if held_in(place) == wanted and not (damage_of(place, wanted, files) if files or doubted else ""):
        return place
    copies.mkdir(parents=True, exist_ok=True)
    for left in (place, *copies.glob(".v*")):  # of another version, damaged, or left by a crash
        shutil.rmtree(left, ignore_errors=True)
    reasons: list[str] = []
    unusable = False
    for held in (*_newest_held(copies, wanted), None):
        try:
            _make(wanted, published, copies, place, held, links=links)
        except (DeltaError, OSError, ValueError) as error:
            reasons.append(f"{error}")
            unusable = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
        else:
            _forget_old(copies, place)
            return place
    raise CopyFailed("; ".join(dict.fromkeys(reasons)), unusable=unusable)


def damage_of(place: Path, wanted: Version, files: Mapping[str, FileSum]) -> str:
    """Describe how a copy differs from the announcement; empty if it does not.

    Args:
        place: directory of the copy.
        wanted: the expected version.
        files: announced sums by name. If one differs, the slower hash of the tensors decides.
    """
    damage = damage_in(place, files)
    if files and not damage:
        return ""
    try:
        found = checksums_of(place).total
    except (OSError, ValueError) as error:
        return damage or str(error)
    return "" if found == wanted.checksum else damage or f"{place}: its checksum is {found}, expected {wanted.checksum}"


def _newest_held(copies: Path, wanted: Version) -> Iterator[Version]:
    """Yield the newest copy that deltas to a version may start from, if there is one."""
    held = [held for _, path in versions_in(copies) if (held := held_in(path)) and held.number < wanted.number]
    yield from held[-1:]


def _make(wanted: Version, published: Path, copies: Path, place: Path, held: Version | None, *, links: bool) -> None:
    if not (published / INDEX).exists():
        _copy_whole(wanted, published, place, links=links)
        return
    route = route_to(wanted, held, on_disk(published.parent))
    if route.whole is not None:
        base = published.with_name(name_of(route.whole))
    else:
        assert held is not None, "a route without whole files begins at the held version"
        base = copies / name_of(held.number)
    made = apply_deltas(base, [published.with_name(name_of(number)) for number in route.deltas], place)
    if made != wanted:
        shutil.rmtree(place)
        raise DeltaError(
            f"{published}: its deltas make version {made.number} ({made.checksum}), expected {wanted.checksum}"
        )


def _copy_whole(wanted: Version, published: Path, place: Path, *, links: bool) -> None:
    with atomic_directory(place) as partial:
        for file in published.iterdir():
            if file.is_file() and file.name not in (NOTE, MANIFEST):
                (os.link if links else shutil.copyfile)(file, partial / file.name)
        found = checksums_of(partial).total
        if found != wanted.checksum:
            message = f"is not version {wanted.number}: its checksum is {found}, expected {wanted.checksum}"
            raise DeltaError(f"{published}: {message}")
        write_held(partial, wanted)


def _forget_old(copies: Path, place: Path) -> None:
    others = [path for _, path in versions_in(copies) if path != place]
    for path in others[: 1 - KEEP_COPIES]:
        shutil.rmtree(path, ignore_errors=True)
