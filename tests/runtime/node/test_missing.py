"""When home waits for a node, and when it ends the run."""

from pathlib import Path

import pytest

from runtime.node.missing import Missing, Need, Part, needs_of_run
from runtime.settings.load import load_topology
from runtime.settings.processes import ProcessSpec, Tier

LAPTOP = Path(__file__).resolve().parents[3] / "topologies" / "laptop.toml"
WAITS = {"n1": 60.0, "n2": 90.0}


def part(name: str, node: str) -> Part:
    return Part(name, {name: node})


def engines(*nodes: str, least: int = 1) -> Need:
    parts = tuple(part(f"engine.policy.{number}", node) for number, node in enumerate(nodes))
    return Need("engines.policy", parts, least, "engines.policy.min_engines")


def test_a_trainer_rank_is_waited_for_and_then_the_run_ends_with_its_node() -> None:
    missing = Missing(
        [Need("trainer.0", (part("trainer.0", "n0"),), 1), Need("trainer.1", (part("trainer.1", "n1"),), 1)], WAITS
    )
    assert missing.look(0.0, ["n0", "n1"]).lines == ()
    assert missing.look(1.0, ["n0"]).lines == (
        "waiting for node n1, up to 60 s (nodes.n1.wait_s): trainer.1 can run on no other node",
    )
    assert missing.look(2.0, ["n0"]).lines == ()  # once
    assert missing.look(60.9, ["n0"]).failure is None
    assert missing.look(61.0, ["n0"]).failure == (
        "node n1 did not come within 60 s (nodes.n1.wait_s): trainer.1 can run on no other node"
    )


def test_a_node_that_comes_back_ends_the_wait() -> None:
    missing = Missing([engines("n1")], WAITS)
    assert missing.look(0.0, ["n0"]).lines
    assert missing.look(50.0, ["n0", "n1"]).lines == ()
    assert missing.look(70.0, ["n0"]).failure is None
    assert missing.look(129.0, ["n0"]).failure is None
    assert missing.look(130.0, ["n0"]).failure is not None


def test_a_pool_runs_down_to_min_engines() -> None:
    missing = Missing([engines("n0", "n1", "n2", least=2)], WAITS)
    assert missing.look(0.0, ["n0", "n2"]).lines == ()
    lines = missing.look(1.0, ["n0"]).lines
    assert lines == (
        "waiting for nodes n1, n2, up to 90 s (nodes.n1.wait_s, nodes.n2.wait_s): "
        "1 of 3 engines are left, fewer than engines.policy.min_engines = 2",
    )
    assert missing.look(2.0, ["n0", "n1"]).lines == ()


def test_engines_that_were_given_up_count_as_gone_and_are_not_waited_for() -> None:
    missing = Missing([engines("n0", "n1", least=1)], WAITS)
    assert missing.give_up("engine.policy.0", "crashed") is None
    assert missing.look(0.0, ["n0", "n1"]).lines == ()
    assert missing.look(1.0, ["n0"]).lines[0].startswith("waiting for node n1, up to 60 s")
    failure = missing.give_up("engine.policy.1", "killed by SIGKILL")
    assert failure == (
        "engines.policy: 0 of 2 engines are left, fewer than engines.policy.min_engines = 1: "
        "engine.policy.0: crashed; engine.policy.1: killed by SIGKILL"
    )
    missing.started("engine.policy.1")  # by a new daemon of its node
    assert missing.look(3.0, ["n0", "n1"]).failure is None


def test_an_engine_over_two_nodes_needs_both() -> None:
    need = Need("engines.policy", (Part("engine.policy.0", {"engine.policy.0": "n0", "engine.policy.0.1": "n1"}),), 1)
    missing = Missing([need], WAITS)
    assert missing.look(0.0, ["n0", "n1"]).lines == ()
    assert missing.look(1.0, ["n0"]).lines


@pytest.mark.parametrize(("present", "waits"), [(["n0"], True), (["n0", "n1"], False)])
def test_the_needs_of_a_run_follow_from_its_processes(present: list[str], waits: bool) -> None:
    def spec(name: str) -> ProcessSpec:
        return ProcessSpec(name=name, command=(), tier=Tier.SERVICE)

    topology = load_topology(LAPTOP, ("engines.policy.num_engines=2", "engines.policy.min_engines=2")).topology
    needs = needs_of_run(
        topology,
        {
            "n0": [spec("buffer+filter"), spec("trainer"), spec("engine.policy.0"), spec("engine.policy.1")],
            "n1": [spec("engine.policy.1.1"), spec("reward.0")],
        },
    )
    assert [need.name for need in needs] == ["trainer", "reward", "engines.policy"]
    assert [len(need.parts) for need in needs] == [1, 1, 2]
    assert needs[2].least == 2
    assert bool(Missing(needs, WAITS).look(0.0, present).lines) is waits
