"""GPU lists of a topology, and their stable order. devices.py finds the GPUs of this machine."""

import ipaddress
import re
from collections.abc import Iterable, Mapping

import msgspec


class Gpu(msgspec.Struct, frozen=True, order=True):
    """One GPU: a node of the topology and an index on it."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


def parse_gpus(text: str | None) -> tuple[Gpu, ...]:
    """Parse a GPU list such as "n0:0-7,n1:0-3,6". An entry without a node belongs to the previous entry's node.

    Raises:
        ValueError: an entry is neither an index nor a rising range, or the first entry has no node.
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
            raise ValueError(
                f"{entry.strip()!r} {'names no node' if not node else 'has its last index before its first'}"
            )
        gpus += [Gpu(node, index) for index in range(first, last + 1)]
    return tuple(gpus)


def show_gpus(gpus: Iterable[Gpu]) -> str:
    """Format GPUs as `parse_gpus` reads them, with adjacent indices joined, in the given order."""
    runs: list[tuple[Gpu, int]] = []
    for gpu in gpus:
        if runs and runs[-1][0].node == gpu.node and runs[-1][1] + 1 == gpu.index:
            runs[-1] = (runs[-1][0], gpu.index)
        else:
            runs.append((gpu, gpu.index))
    return ",".join(str(first) if first.index == last else f"{first}-{last}" for first, last in runs)


def order_gpus(gpus: Iterable[Gpu], addresses: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Sort GPUs in the order in which ranks and engines take them: by node address, then by index, both numerically.

    Args:
        addresses: by node; a node without one, or with "auto", is sorted by its name.
    """
    keys = {gpu: address_key(_known(addresses, gpu.node)) for gpu in gpus}
    return tuple(sorted(keys, key=lambda gpu: (keys[gpu], natural_key(gpu.node), gpu.index)))


def _known(addresses: Mapping[str, str], node: str) -> str:
    address = addresses.get(node, "auto")
    return node if address == "auto" else address


def address_key(address: str) -> tuple[int, ...]:
    """Return a numeric sort key: 10.0.0.9 before 10.0.0.10, IPv6 by bytes, other names by their characters."""
    try:
        return tuple(ipaddress.ip_address(address.strip("[]")).packed)
    except ValueError:
        return tuple(number for part in natural_key(address) for number in part)


def natural_key(name: str) -> tuple[tuple[int, ...], ...]:
    """Return a natural sort key: n2 before n10."""
    parts = re.findall(r"\d+|\D", name)
    return tuple((0, int(part)) if part.isdigit() else (1, ord(part)) for part in parts)
