"""Weight versions in one directory, named like `v000007`: full files, or deltas, and the way to a wanted version."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from runtime.models.delta import NOTE, Version
from runtime.util.files import write_atomically

WEIGHTS: Final = "weights"  # in the run directory: the versions that the trainer publishes
ADAPTERS: Final = "adapters"  # in that: LoRA adapters
ADAPTER_BASES: Final = "adapters/base"  # in that: the base models of these adapters, in full
SERIES: Final = ("", ADAPTERS, ADAPTER_BASES)  # directories of versions that are numbered, copied and kept on their own
_NAME: Final = re.compile(r"v(\d{6,})")


class OnDisk(NamedTuple):
    """A version with files on disk: full files, a delta against another version, or both."""

    version: Version
    whole_bytes: int | None = None  # none: there are no full files
    base: Version | None = None  # base of its delta; none: there is no delta
    delta_bytes: int = 0


class Route(NamedTuple):
    """The steps to get a version."""

    whole: int | None  # start from the full files of this version; none: start from the copy
    deltas: tuple[int, ...]  # then apply the deltas of these versions, in this order
    size_bytes: int  # bytes to read from the published versions


def route_to(wanted: Version, held: Version | None, on_disk: Iterable[OnDisk]) -> Route:
    """Return the route that reads the fewest bytes. Between equal ones, return the route with fewer deltas.

    Args:
        wanted: the version.
        held: version of the copy; none: there is no usable copy.
        on_disk: all versions with files, in any order. Versions with different checksums are different versions, even
            if their numbers are equal.

    Raises:
        ValueError: there is no route; the message says where the chain of deltas breaks.
    """
    known = {stored.version: stored for stored in on_disk}
    found: list[Route] = []
    deltas: list[int] = []
    size, place = 0, wanted
    while True:
        after = tuple(reversed(deltas))
        if place == held:
            found.append(Route(None, after, size))
        stored = known.get(place)
        if stored is not None and stored.whole_bytes is not None:
            found.append(Route(place.number, after, size + stored.whole_bytes))
        if stored is None or stored.base is None or stored.base.number >= place.number:
            break
        deltas.append(place.number)
        size, place = size + stored.delta_bytes, stored.base
    if not found:
        raise ValueError(
            f"version {wanted.number} cannot be made from {_name_of(held)}: its deltas need version {place.number} "
            f"({place.checksum}), which has neither whole files nor a delta; on disk: {_numbers(known)}"
        )
    return min(found, key=lambda route: (route.size_bytes, len(route.deltas)))


def needed_for(wanted: Version, on_disk: Iterable[OnDisk]) -> set[int]:
    """Return the versions to keep so that a node without a copy can get this one. Raises as `route_to` does."""
    route = route_to(wanted, None, on_disk)
    return {number for number in (route.whole, *route.deltas) if number is not None}


def goes_whole(latest: Version | None, on_disk: Iterable[OnDisk], *, every: int) -> bool:
    """Return whether the next version must be published in full, so that delta chains stay short.

    Args:
        latest: the base of the next delta; none: there is none.
        on_disk: versions with files.
        every: one of this many consecutive versions is full.
    """
    if latest is None:
        return True
    try:
        return len(route_to(latest, None, on_disk).deltas) + 1 >= every
    except ValueError:  # a node without a copy could not get it
        return True


def _name_of(held: Version | None) -> str:
    return "nothing" if held is None else f"version {held.number} ({held.checksum})"


def _numbers(known: Mapping[Version, OnDisk]) -> str:
    return ", ".join(str(version.number) for version in sorted(known)) or "none"


def name_of(version: int) -> str:
    """Return the directory name of a version."""
    return f"v{version:06d}"


def versions_in(root: Path) -> list[tuple[int, Path]]:
    """Return complete versions with their directories, oldest first."""
    return sorted((int(match[1]), path) for path in root.glob("v*") if (match := _NAME.fullmatch(path.name)))


def write_note(directory: Path, stored: OnDisk) -> None:
    """Write a note into a version's directory that says whether it holds full files, a delta, or both."""
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
