"""Which topologies listen beyond one machine, and where."""

from pathlib import Path

import pytest

from runtime.settings.load import load_topology
from runtime.settings.placement import address_setting, bus_port, is_networked

LAPTOP = Path(__file__).resolve().parents[3] / "topologies" / "laptop.toml"
JUDGED = ("reward.external=['judge']", "data.0.rm_type=judge")
TWO = ("nodes.local.address=auto", "nodes.b.address=10.0.0.2", "bus.node=local")


@pytest.mark.parametrize(
    ("overrides", "networked", "port"),
    [
        ((), False, None),
        (("nodes.local.address=127.0.0.1",), False, None),
        (("nodes.local.address=::1",), False, None),
        (("nodes.local.address=none",), False, None),
        (("bus.port=5000",), False, 5000),
        (("nodes.local.address=127.0.0.1", *JUDGED), True, 4222),
        (("nodes.local.address=127.0.0.2", *JUDGED), True, 4222),
        (("nodes.local.address=::1", "bus.port=5000", *JUDGED), True, 5000),
        (("nodes.local.address=auto",), True, 4222),
        (("nodes.local.address=10.0.0.1", "bus.port=5000"), True, 5000),
        (TWO, True, 4222),
        (("nodes.b.address=127.0.0.2", "bus.node=local"), True, 4222),
    ],
)
def test_several_nodes_or_an_address_listen_beyond_the_machine(
    overrides: tuple[str, ...], networked: bool, port: int | None
) -> None:
    topology = load_topology(LAPTOP, overrides).topology
    assert (is_networked(topology), bus_port(topology)) == (networked, port)


def test_an_address_is_loopback_with_one_node_and_found_with_several() -> None:
    assert address_setting(load_topology(LAPTOP, ("nodes.local.address=none",)).topology, "local") == "127.0.0.1"
    two = load_topology(LAPTOP, (*TWO, "nodes.local.address=none")).topology
    assert (address_setting(two, "local"), address_setting(two, "b")) == ("auto", "10.0.0.2")
