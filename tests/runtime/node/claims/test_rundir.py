"""Options that would have no effect are refused, by --check and by a start. So is another recipe than the run's."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.node.claims.rundir import FORMAT, RunRefused, check_start
from runtime.settings.topology import encode_topology
from tests.build.topology import topology_with

ONE: dict[str, Any] = {"nodes": {"n0": {}}}
TWO: dict[str, Any] = {"nodes": {"n0": {}, "n1": {}}}
FOREIGN_BUS: dict[str, Any] = {**TWO, "bus": {"url": "nats://h:4222"}}
JOIN = Path("join.toml")


@pytest.mark.parametrize(
    ("tables", "node", "options", "said"),
    [
        (ONE, "n0", {"join": JOIN}, "--join join.toml: node n0 starts the bus itself"),
        (FOREIGN_BUS, "n1", {"join": JOIN}, r"--join join.toml: the topology names the bus \(bus.url\)"),
        (ONE, "n0", {"take_over": True}, "--take-over: only a topology of several nodes, .* leave --take-over out"),
        (FOREIGN_BUS, "n0", {"take_over": True}, "--take-over: only a topology of several nodes, .* starts the bus"),
        (TWO, "n1", {"take_over": True}, "node n1 holds no lease; only node n0, which starts the bus, does"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    tmp_path: Path, tables: dict[str, Any], node: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunRefused, match=said):
        check_start(topology_with(run={"dir": str(tmp_path)}, **tables), None, node, **options)


def test_an_option_with_an_effect_is_taken(tmp_path: Path) -> None:
    two = topology_with(run={"dir": str(tmp_path)}, **TWO)
    check_start(two, None, "n1", join=JOIN)
    check_start(two, None, "n0", take_over=True)
    check_start(topology_with(run={"dir": str(tmp_path)}, **ONE), None, "n0")


def test_a_run_that_began_with_another_default_says_what_to_write(tmp_path: Path) -> None:
    """`reward.on_failure` was "drop" by default, and topology.json holds all defaults."""
    run = {"dir": str(tmp_path)}
    topology = topology_with(run=run)
    stored = json.loads(encode_topology(topology))
    stored["reward"]["on_failure"] = "drop"
    run_dir = tmp_path / topology.run.name
    run_dir.mkdir()
    (run_dir / "topology.json").write_text(json.dumps(stored))
    (run_dir / "format").write_text(f"{FORMAT}\n")
    with pytest.raises(RunRefused) as refused:
        check_start(topology, None, "local")
    assert '\n  reward.on_failure: "drop" → "drop_sample"\nto resume it, write the values before' in str(refused.value)
    check_start(topology_with(run=run, reward={"on_failure": "drop"}), None, "local")
