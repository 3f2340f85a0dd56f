"""What an address setting means: with made interfaces, and on this machine."""

import socket
from collections.abc import Callable

import pytest

from runtime.node.network import (
    Interface,
    NoAddress,
    NodeAddress,
    address_here,
    address_towards,
    default_routes,
    interfaces_here,
    resolve_name,
    source_towards,
)

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETH0 = Interface(name="eth0", addresses=("10.77.0.10", "fd77::10"), default_route=True)
IB0 = Interface(name="ib0", addresses=("10.78.0.10",))
SIX = Interface(name="eth0", addresses=("fd77::10",), default_route=True)
ON_ETH0 = NodeAddress(ip="10.77.0.10", interface="eth0")


def names(**table: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def resolve(name: str) -> tuple[str, ...]:
        if name not in table:
            raise socket.gaierror(-2, "Name or service not known")
        return table[name]

    return resolve


@pytest.mark.parametrize(
    ("setting", "interfaces", "expected"),
    [
        ("auto", (LO, ETH0, IB0), ON_ETH0),
        ("auto", (LO, SIX), NodeAddress(ip="fd77::10", interface="eth0")),
        ("auto", (LO, IB0), NodeAddress(ip="10.78.0.10", interface="ib0")),  # no route, as in a closed network
        ("ib0", (LO, ETH0, IB0), NodeAddress(ip="10.78.0.10", interface="ib0")),
        ("10.78.0.10", (LO, ETH0, IB0), NodeAddress(ip="10.78.0.10", interface="ib0")),
        ("fd77:0:0::10", (LO, ETH0), NodeAddress(ip="fd77::10", interface="eth0")),
        ("[fd77::10]", (LO, ETH0), NodeAddress(ip="fd77::10", interface="eth0")),
        ("127.0.0.3", (LO, ETH0), NodeAddress(ip="127.0.0.3", interface="lo")),
        ("n0.example", (LO, ETH0), NodeAddress(ip="10.77.0.10", interface="eth0", name="n0.example")),
        ("debian", (LO, ETH0), NodeAddress(ip="10.77.0.10", interface="eth0", name="debian")),
    ],
)
def test_a_setting_means_one_address_of_this_machine(
    setting: str, interfaces: tuple[Interface, ...], expected: NodeAddress
) -> None:
    resolve = names(**{"n0.example": ("10.77.0.10",), "debian": ("127.0.1.1", "10.77.0.10")})
    assert address_here(setting, interfaces, resolve) == expected


@pytest.mark.parametrize(
    ("setting", "interfaces", "part"),
    [
        ("auto", (LO, ETH0, Interface(name="eth1", addresses=("10.9.0.1",), default_route=True)), "several interfaces"),
        ("auto", (LO, ETH0, Interface(name="eth1", addresses=("10.9.0.1",), default_route=True)), "eth1: 10.9.0.1"),
        ("auto", (LO, IB0, Interface(name="eth1", addresses=("10.9.0.1",))), "several interfaces qualify"),
        ("auto", (LO,), "no interface has an address"),
        ("10.0.0.1", (LO, ETH0), "this machine does not have the address 10.0.0.1; this machine has lo: 127.0.0.1"),
        ("eth0", (Interface(name="eth0", addresses=()),), "interface eth0 has no address"),
        ("nowhere", (LO, ETH0), "nor a DNS name that resolves (Name or service not known)"),
        ("alone", (LO, ETH0), "resolves to 127.0.1.1 here, which other nodes cannot reach"),
        ("other", (LO, ETH0), "resolves to 10.77.0.11, no address of this machine"),
    ],
)
def test_what_means_none_or_several_is_refused_with_the_list(
    setting: str, interfaces: tuple[Interface, ...], part: str
) -> None:
    with pytest.raises(NoAddress) as caught:
        address_here(setting, interfaces, names(alone=("127.0.1.1",), other=("10.77.0.11",)))
    assert part in str(caught.value)


def test_a_dns_name_is_announced_instead_of_its_address() -> None:
    assert NodeAddress(ip="10.77.0.10", interface="eth0", name="n0.example").announced == "n0.example"
    assert ON_ETH0.announced == "10.77.0.10"


def test_a_route_through_loopback_is_refused_unless_the_bus_is_there_on_purpose() -> None:
    assert address_towards("10.77.0.10", (LO, ETH0)) == ON_ETH0
    assert address_towards("127.0.0.1", (LO, ETH0), loopback=True).interface == "lo"
    with pytest.raises(NoAddress, match="as with a tunnel"):
        address_towards("127.0.0.1", (LO, ETH0))


def test_the_kernel_lists_loopback() -> None:
    by_name = {each.name: each for each in interfaces_here()}
    assert "127.0.0.1" in by_name["lo"].addresses
    assert not by_name["lo"].default_route


def test_default_routes_are_those_to_everywhere_that_refuse_nothing() -> None:
    """Lines of Linux' two tables (Documentation/networking; /proc/net/route, ipv6_route), from two machines."""
    ipv4 = (
        "eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0",
        "eth1\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0",
        "vpn0\t00000000\t00000000\t0001\t0\t0\t50\t00000080\t0\t0\t0",  # 0.0.0.0/1
    )
    nowhere, link = "0" * 32, "fe80" + "0" * 28
    ipv6 = (
        f"{nowhere} 00 {nowhere} 00 {link} 00000400 00000001 00000000 00000003     eth2",
        f"{nowhere} 00 {nowhere} 00 {nowhere} ffffffff 00000001 00000000 00200200       lo",  # unreachable
        f"{link} 40 {nowhere} 00 {nowhere} 00000100 00000001 00000000 00000001     eth3",
    )
    assert default_routes(ipv4, ()) == {"eth0"}
    assert default_routes((), ipv6) == {"eth2"}


def test_the_source_of_a_connection_to_loopback_is_loopback() -> None:
    assert source_towards("127.0.0.1", 4222) == "127.0.0.1"
    assert "127.0.0.1" in resolve_name("localhost")
