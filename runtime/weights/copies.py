"""A node's own whole copies of versions, made of what is published: whole files, or changes to what the node has.

A copy is made beside the older ones under a hidden name and gets its own once all of it is there, hashed and on the
disk. So a death in between leaves those that are there usable. What is damaged, here or there, is found by its
checksum, and the copy made once more, of whole files.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from messages import FileSum
from runtime.checksums import checksums_of
from runtime.files import complete_directory
from runtime.weights.delta import INDEX, NOTE, DeltaError, Version, apply_deltas, held_in, write_held
from runtime.weights.route import route_to
from runtime.weights.sums import damage_in
from runtime.weights.versions import name_of, on_disk, versions_in

KEEP_COPIES: Final = 2  # the newest, and the one that an engine may still be reading


class CopyFailed(Exception):
    """A version cannot be copied; says why, with file and tensor where that is known."""

    def __init__(self, reason: str, *, unusable: bool = False) -> None:
        super().__init__(reason)
        self.unusable = unusable  # what is published is not what was announced


def make_copy(
    wanted: Version,
    published: Path,
    copies: Path,
    *,
    doubted: bool = False,
    files: Mapping[str, FileSum] = MappingProxyType({}),
) -> Path:
    """Directory with a whole copy of a version, made unless it is there. One call at a time.

    Args:
        wanted: which one.
        published: its directory, beside those of other versions.
        copies: where this node has its own.
        doubted: an engine did not hold the version after it had read the copy: the copy is hashed.
        files: by name, as announced: a copy that is there already is compared with them.

    Raises:
        CopyFailed: it cannot be made.
    """
    place = copies / name_of(wanted.number)
    if held_in(place) == wanted and not (damage_of(place, wanted, files) if files or doubted else ""):
        return place
    copies.mkdir(parents=True, exist_ok=True)
    for left in (place, *copies.glob(".v*")):  # another's, damaged, or of a death
        shutil.rmtree(left, ignore_errors=True)
    reasons: list[str] = []
    unusable = False
    for held in (*_newest_held(copies, wanted), None):
        try:
            _make(wanted, published, copies, place, held)
        except (DeltaError, OSError, ValueError) as error:
            reasons.append(f"{error}")
            unusable = not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
        else:
            _forget_old(copies, place)
            return place
    raise CopyFailed("; ".join(dict.fromkeys(reasons)), unusable=unusable)


def damage_of(place: Path, wanted: Version, files: Mapping[str, FileSum]) -> str:
    """What of a copy is not as it was announced; empty when it is right.

    Args:
        place: of the copy.
        wanted: which version it is to be.
        files: by name, as announced. One that differs counts only if the tensors do: their hash is slow and decides.
    """
    damage = damage_in(place, files)
    if files and not damage:
        return ""
    try:
        found = checksums_of(place).total
    except (OSError, ValueError) as error:
        return damage or str(error)
    return "" if found == wanted.checksum else damage or f"{place}: its checksum is {found}, not {wanted.checksum}"


def _newest_held(copies: Path, wanted: Version) -> Iterator[Version]:
    """The newest copy that a version may be made of."""
    held = [held for _, path in versions_in(copies) if (held := held_in(path)) and held.number < wanted.number]
    yield from held[-1:]


def _make(wanted: Version, published: Path, copies: Path, place: Path, held: Version | None) -> None:
    if not (published / INDEX).exists():
        _copy_whole(wanted, published, place)
        return
    route = route_to(wanted, held, on_disk(published.parent))
    if route.whole is not None:
        base = published.with_name(name_of(route.whole))
    else:
        assert held is not None, "a way that begins with what the copy holds"
        base = copies / name_of(held.number)
    made = apply_deltas(base, [published.with_name(name_of(number)) for number in route.deltas], place)
    if made != wanted:
        shutil.rmtree(place)
        raise DeltaError(f"{published}: leads to version {made.number} ({made.checksum}), not to {wanted.checksum}")


def _copy_whole(wanted: Version, published: Path, place: Path) -> None:
    partial = place.with_name(f".{place.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in published.iterdir():
        if file.is_file() and file.name != NOTE:
            shutil.copyfile(file, partial / file.name)
    found = checksums_of(partial).total
    if found != wanted.checksum:
        raise DeltaError(f"{published}: is not version {wanted.number}: its checksum is {found}, not {wanted.checksum}")
    write_held(partial, wanted)
    complete_directory(partial, place)


def _forget_old(copies: Path, place: Path) -> None:
    others = [path for _, path in versions_in(copies) if path != place]
    for path in others[: 1 - KEEP_COPIES]:
        shutil.rmtree(path, ignore_errors=True)
