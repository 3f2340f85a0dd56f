"""Names of GPUs, and their stable order. Which this machine has is in devices.py."""

import ipaddress
import re
from collections.abc import Iterable, Mapping

import msgspec


class Gpu(msgspec.Struct, frozen=True, order=True):
    """One GPU: a node of the topology and an index there."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


def parse_gpus(text: str | None) -> tuple[Gpu, ...]:
    """Read a GPU list such as "n0:0-7,n1:0-3,6"; an entry without a node goes on with the last one.

    Raises:
        ValueError: an entry that is neither an index nor a rising range, or a first entry without a node.
    """
    gpus: list[Gpu] = []
    node = ""
    for entry in (text or "").split(",") if text else ():
        found = re.fullmatch(r"\s*(?:([^\s:]+):)?(\d+)(?:-(\d+))?\s*", entry)
        if not found:
            raise ValueError(f"{entry.strip()!r} is not NODE:INDEX or NODE:FIRST-LAST")
        node = found[1] or node
        first, last = int(found[2]), int(found[3] or found[2])
        if not node or last < first:
            raise ValueError(f"{entry.strip()!r} {'names no node' if not node else 'counts down'}")
        gpus += [Gpu(node, index) for index in range(first, last + 1)]
    return tuple(gpus)


def show_gpus(gpus: Iterable[Gpu]) -> str:
    """Spell a GPU list as `parse_gpus` reads it, neighbours joined, order kept."""
    runs: list[tuple[Gpu, int]] = []
    for gpu in gpus:
        if runs and runs[-1][0].node == gpu.node and runs[-1][1] + 1 == gpu.index:
            runs[-1] = (runs[-1][0], gpu.index)
        else:
            runs.append((gpu, gpu.index))
    return ",".join(str(first) if first.index == last else f"{first}-{last}" for first, last in runs)


def order_gpus(gpus: Iterable[Gpu], addresses: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Put GPUs in the order ranks and engines take them: by node address, then by index, both as numbers.

    Args:
        addresses: by node; a node without one, or with "auto", is ordered by its name.
    """
    keys = {gpu: address_key(_known(addresses, gpu.node)) for gpu in gpus}
    return tuple(sorted(keys, key=lambda gpu: (keys[gpu], natural_key(gpu.node), gpu.index)))


def _known(addresses: Mapping[str, str], node: str) -> str:
    address = addresses.get(node, "auto")
    return node if address == "auto" else address


def address_key(address: str) -> tuple[int, ...]:
    """Order addresses by number: 10.0.0.9 before 10.0.0.10, IPv6 by its bytes, other names by their characters."""
    try:
        return tuple(ipaddress.ip_address(address.strip("[]")).packed)
    except ValueError:
        return tuple(number for part in natural_key(address) for number in part)


def natural_key(name: str) -> tuple[tuple[int, ...], ...]:
    """Order names with numbers in them as a person would: n2 before n10."""
    parts = re.findall(r"\d+|\D", name)
    return tuple((0, int(part)) if part.isdigit() else (1, ord(part)) for part in parts)
