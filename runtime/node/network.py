"""The address of this node: what `nodes.<name>.address` means here, from the kernel's interfaces and routes."""

import ipaddress
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from runtime.settings.placement import AUTO

ROUTES: Final = Path("/proc/net/route")  # of the kernel, for this network namespace
ROUTES_SIX: Final = Path("/proc/net/ipv6_route")
RTF_REJECT: Final = 0x0200  # a route that refuses its packets
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)

Resolver = Callable[[str], Iterable[str]]  # from a DNS name to its addresses; OSError without an answer


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface that is up, without its link-local addresses."""

    name: str
    addresses: tuple[str, ...]  # IPv4 first
    default_route: bool = False


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a node's servers listen."""

    ip: str
    interface: str
    name: str | None = None  # DNS name that the topology gives; it may move to another machine

    @property
    def announced(self) -> str:
        """The host in URLs for other nodes."""
        return self.name or self.ip


class NoAddress(Exception):
    """An address setting means no address of this machine, or more than one. The text lists what there is."""


def address_here(setting: str, interfaces: Iterable[Interface], resolve: Resolver) -> NodeAddress:
    """Return the address that a setting means on this machine. "auto" is the address of the default route.

    Args:
        setting: an IP address, an interface, a DNS name, or "auto".
        interfaces: of this machine.
        resolve: looks up a DNS name.

    Raises:
        NoAddress: it means none, or several.
    """
    here = tuple(interfaces)
    if setting == AUTO:
        return _by_default_route(here)
    try:
        return _with_ip(str(ipaddress.ip_address(setting.strip("[]"))), here)
    except ValueError:
        pass
    for interface in here:
        if interface.name == setting:
            if not interface.addresses:
                raise NoAddress(f"interface {setting} has no address; {_listed(here)}")
            return NodeAddress(ip=interface.addresses[0], interface=setting)
    return _with_name(setting, here, resolve)


def address_towards(source: str, interfaces: Iterable[Interface], *, loopback: bool = False) -> NodeAddress:
    """Return the address that the kernel uses as the source of connections to the bus.

    Args:
        source: of a connection to the bus.
        interfaces: of this machine.
        loopback: whether the bus is at a loopback address on purpose: all nodes are on one machine.

    Raises:
        NoAddress: the route goes through loopback, as with a tunnel: other nodes could not reach this one there.
    """
    here = tuple(interfaces)
    found = _with_ip(source, here)
    if ipaddress.ip_address(found.ip).is_loopback and not loopback:
        raise NoAddress(
            f"the route to the bus goes through loopback, as with a tunnel: name the address; {_listed(here)}"
        )
    return found


def _by_default_route(here: tuple[Interface, ...]) -> NodeAddress:
    """Choose the interface with the default route; without any route, the only interface that is not loopback."""
    usable = [each for each in here if any(not ipaddress.ip_address(text).is_loopback for text in each.addresses)]
    qualified = [each for each in usable if each.default_route] or usable
    if len(qualified) != 1:
        why = "several interfaces qualify" if qualified else "no interface has an address"
        raise NoAddress(f"{why}: name one, or its address; {_listed(here)}")
    return NodeAddress(ip=qualified[0].addresses[0], interface=qualified[0].name)


def _with_ip(ip: str, here: tuple[Interface, ...]) -> NodeAddress:
    for interface in here:
        if ip in interface.addresses or (ipaddress.ip_address(ip).is_loopback and "127.0.0.1" in interface.addresses):
            return NodeAddress(ip=ip, interface=interface.name)
    raise NoAddress(f"this machine does not have the address {ip}; {_listed(here)}")


def _with_name(name: str, here: tuple[Interface, ...], resolve: Resolver) -> NodeAddress:
    try:
        found = list(dict.fromkeys(resolve(name)))
    except OSError as error:
        why = error.strerror or str(error)
        raise NoAddress(
            f"neither an interface of this machine nor a DNS name that resolves ({why}); {_listed(here)}"
        ) from error
    outside = [ip for ip in found if not ipaddress.ip_address(ip).is_loopback]
    for interface in here:
        for ip in outside:
            if ip in interface.addresses:
                return NodeAddress(ip=ip, interface=interface.name, name=name)
    if found and not outside:
        raise NoAddress(f"resolves to {', '.join(found)} here, which other nodes cannot reach; {_listed(here)}")
    raise NoAddress(f"resolves to {', '.join(found)}, no address of this machine; {_listed(here)}")


def _listed(here: tuple[Interface, ...]) -> str:
    listed = "; ".join(f"{each.name}: {', '.join(each.addresses) or 'no address'}" for each in here)
    return f"this machine has {listed or 'no interface that is up'}"


def resolve_name(name: str) -> list[str]:
    """Return the addresses of a DNS name.

    Raises:
        OSError: it does not resolve.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for family, _, _, _, address in found if family in FAMILIES]


def source_towards(host: str, port: int) -> str:
    """Return the address that the kernel uses as the source of connections to a host. Sends nothing.

    Raises:
        OSError: the host does not resolve, or there is no route to it.
    """
    problem: OSError = OSError(f"{host} has no address")
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)
            except OSError as error:
                problem = error
                continue
            return str(probe.getsockname()[0])
    raise problem


def interfaces_here() -> list[Interface]:
    """Return the interfaces of this machine that are up.

    Raises:
        OSError: the kernel does not list them.
    """
    import psutil  # imported late: a run on one machine needs no addresses

    up, routed = psutil.net_if_stats(), default_routes(_lines(ROUTES), _lines(ROUTES_SIX))
    return [
        Interface(
            name=name,
            addresses=tuple(_usable(entry.address for entry in entries if entry.family in FAMILIES)),
            default_route=name in routed,
        )
        for name, entries in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    ]


def default_routes(ipv4: Iterable[str], ipv6: Iterable[str]) -> set[str]:
    """Return the interfaces of the default routes, from the lines of the kernel's two tables."""
    found: set[str] = set()
    for line in ipv4:
        interface, destination, _, flags, _, _, _, mask, *_ = line.split()
        if destination == mask == "00000000" and not int(flags, 16) & RTF_REJECT:
            found.add(interface)
    for line in ipv6:
        destination, length, _, _, _, _, _, _, flags, interface = line.split()
        if int(destination, 16) == 0 and length == "00" and not int(flags, 16) & RTF_REJECT:
            found.add(interface)
    return found


def _usable(addresses: Iterable[str]) -> list[str]:
    """Leave out link-local addresses, and sort IPv4 first."""
    usable = [text for text in addresses if not ipaddress.ip_address(text).is_link_local]
    return sorted(usable, key=lambda text: ":" in text)


def _lines(table: Path) -> list[str]:
    """Return the lines of a table of routes, without its heading."""
    try:
        lines = table.read_text().splitlines()
    except FileNotFoundError:  # this kernel has no IPv6
        return []
    return [line for line in lines if not line.startswith("Iface")]
