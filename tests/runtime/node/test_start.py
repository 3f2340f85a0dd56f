"""Options that would have no effect are refused before a start."""

from pathlib import Path
from typing import Any

import pytest

from runtime.node.claims.rundir import RunRefused
from runtime.node.start import StartOptions, refuse_unused
from tests.build.topology import topology_with

TWO = {"n0": {}, "n1": {}}
JOIN = Path("join.toml")


@pytest.mark.parametrize(
    ("nodes", "bus", "options", "said"),
    [
        ({"n0": {}}, {}, {"join": JOIN}, "--join join.toml: node n0 starts the bus itself"),
        (TWO, {"url": "nats://h:4222"}, {"node": "n1", "join": JOIN}, r"the topology names the bus \(bus.url\)"),
        ({"n0": {}}, {}, {"take_over": True}, "only a topology of several nodes has a lease to take over"),
        (
            TWO,
            {},
            {"node": "n1", "take_over": True},
            "node n1 holds no lease; only node n0, which starts the bus, does",
        ),
        (TWO, {"url": "nats://h:4222"}, {"take_over": True}, "the bus of this topology is not ours"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    nodes: dict[str, Any], bus: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunRefused, match=said):
        refuse_unused(topology_with(nodes=nodes, bus=bus), StartOptions(**{"node": "n0", "command": "c"} | options))


def test_an_option_with_an_effect_is_taken() -> None:
    two = topology_with(nodes=TWO)
    refuse_unused(two, StartOptions(node="n1", command="c", join=JOIN))
    refuse_unused(two, StartOptions(node="n0", command="c", take_over=True))
    refuse_unused(topology_with(nodes={"n0": {}}), StartOptions(node="n0", command="c"))
