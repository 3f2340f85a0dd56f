"""Which files lead from what a copy holds, or from nothing, to a version; reckoned from a list of what there is."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from runtime.weights.delta import Version


class OnDisk(NamedTuple):
    """A version of which there are files: whole ones, a delta against another version, or both."""

    version: Version
    whole_bytes: int | None = None  # none: there are no whole files
    base: Version | None = None  # of its delta; none: there is none
    delta_bytes: int = 0


class Route(NamedTuple):
    """What to do for a version."""

    whole: int | None  # take the whole files of this one first; none: begin with what the copy holds
    deltas: tuple[int, ...]  # then apply the deltas of these, in this order
    size_bytes: int  # to read from where versions lie


def route_to(wanted: Version, held: Version | None, on_disk: Iterable[OnDisk]) -> Route:
    """The way that reads the fewest bytes; of equal ones the one with fewer deltas.

    Args:
        wanted: which version.
        held: by the copy; none: nothing of use.
        on_disk: all versions of which there are files, in any order. A version of another checksum than wanted, or
            than a delta names, is another version.

    Raises:
        ValueError: no way leads there; says where the last one ends.
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
            f"no way to version {wanted.number} from {_said(held)}: back from there by deltas, version {place.number} "
            f"({place.checksum}) has neither whole files nor a delta; there are {_numbers(known)}"
        )
    return min(found, key=lambda route: (route.size_bytes, len(route.deltas)))


def needed_for(wanted: Version, on_disk: Iterable[OnDisk]) -> set[int]:
    """Which versions have to stay, for who holds nothing to get this one; raises as `route_to` does."""
    route = route_to(wanted, None, on_disk)
    return {number for number in (route.whole, *route.deltas) if number is not None}


def goes_whole(latest: Version | None, on_disk: Iterable[OnDisk], *, every: int) -> bool:
    """Whether the version after the latest one has to be whole, so that chains stay short.

    Args:
        latest: the version that a delta would be against; none: there is none.
        on_disk: what there is of it, and before it.
        every: of so many versions in a row one is whole.
    """
    if latest is None:
        return True
    try:
        return len(route_to(latest, None, on_disk).deltas) + 1 >= every
    except ValueError:  # who comes late could not get it
        return True


def _said(held: Version | None) -> str:
    return "nothing" if held is None else f"version {held.number} ({held.checksum})"


def _numbers(known: Mapping[Version, OnDisk]) -> str:
    return ", ".join(str(version.number) for version in sorted(known)) or "none"
