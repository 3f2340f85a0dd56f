"""The address of this node: what `nodes.<name>.address` means here, from the kernel's interfaces and routes."""

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from runtime.settings.placement import AUTO

IFF_UP: Final = 0x1
RTM_GETLINK: Final = 18
RTM_GETADDR: Final = 22
RTM_GETROUTE: Final = 26
IFLA_IFNAME: Final = 3
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2  # the own address of an IPv4 link between two machines
RTA_OIF: Final = 4
MAIN_TABLE: Final = 254
RTN_UNICAST: Final = 1
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
NLM_F_DUMP: Final = 0x301  # with NLM_F_REQUEST
ANSWER_TIMEOUT_S: Final = 5.0
FAMILIES: Final = {socket.AF_INET: 4, socket.AF_INET6: 16}  # bytes of an address

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
    """Return the interfaces of this machine that are up, as the kernel lists them.

    Raises:
        OSError: the kernel does not answer.
    """
    names: dict[int, str] = {}
    for body in _dump(RTM_GETLINK, socket.AF_UNSPEC):
        _, _, index, flags, _ = struct.unpack_from("=BxHiII", body)
        if flags & IFF_UP:
            names[index] = _attributes(body, 16).get(IFLA_IFNAME, b"").rstrip(b"\0").decode()
    addresses: dict[int, list[str]] = {index: [] for index in names}
    for body in _dump(RTM_GETADDR, socket.AF_UNSPEC):
        family, _, _, _, index = struct.unpack_from("=BBBBI", body)
        found = _attributes(body, 8)
        raw = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS)
        if family in FAMILIES and raw is not None and index in addresses:
            addresses[index].append(socket.inet_ntop(family, raw))
    routed = {index for family in FAMILIES for index in _default_routes(family)}
    return [
        Interface(name=name, addresses=tuple(_usable(addresses[index])), default_route=index in routed)
        for index, name in names.items()
    ]


def _usable(addresses: list[str]) -> list[str]:
    """Leave out link-local addresses, and sort IPv4 first."""
    usable = [text for text in addresses if not ipaddress.ip_address(text).is_link_local]
    return sorted(usable, key=lambda text: ":" in text)


def _default_routes(family: int) -> Iterator[int]:
    """Yield the interfaces of the default routes."""
    for body in _dump(RTM_GETROUTE, family):
        _, length, _, _, table, _, _, kind = struct.unpack_from("=BBBBBBBB", body)
        oif = _attributes(body, 12).get(RTA_OIF)
        if length == 0 and table == MAIN_TABLE and kind == RTN_UNICAST and oif is not None:
            yield struct.unpack("=I", oif)[0]


def _dump(kind: int, family: int) -> Iterator[bytes]:
    """Ask the kernel for a table, and yield the bodies of its messages."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(ANSWER_TIMEOUT_S)
        kernel.bind((0, 0))
        kernel.send(struct.pack("=IHHIIB15x", 32, kind, NLM_F_DUMP, 1, 0, family))
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, found, _, _, _ = struct.unpack_from("=IHHII", data)
                if found == NLMSG_DONE:
                    return
                if found == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", data, 16)[0]
                    raise OSError(number, "the kernel does not list its network interfaces")
                yield data[16:length]
                data = data[_aligned(length) :]


def _attributes(body: bytes, start: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while start + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, start)
        found[kind] = body[start + 4 : start + length]
        start += _aligned(max(length, 4))
    return found


def _aligned(length: int) -> int:
    return (length + 3) & ~3
