"""One half of a topology alone: its GPUs, its nodes, its processes, and what it cannot have."""

from pathlib import Path

import pytest

from actors.processes import process_specs
from runtime.settings.gpus import parse_gpus
from runtime.settings.load import load_topology
from runtime.settings.placement import num_engines, num_ranks
from runtime.settings.plan import draw, plan_of
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology

TOPOLOGIES = Path(__file__).resolve().parents[3] / "topologies"
LAPTOP, COLOCATED, DISAGGREGATED = "laptop.toml", "colocate-8gpu.toml", "disaggregate-2x8gpu.toml"


def half(file: str, *overrides: str) -> Topology:
    return load_topology(TOPOLOGIES / file, overrides).topology


def processes(topology: Topology) -> dict[str, list[str]]:
    return {node: [spec.name for spec in process_specs(topology, node, Path("r"))] for node in topology.nodes}


def gpus(topology: Topology) -> int:
    """GPUs that processes are given."""
    specs = [spec for node in topology.nodes for spec in process_specs(topology, node, Path("r"))]
    given = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs if spec.env.get("CUDA_VISIBLE_DEVICES")]
    return sum(len(devices.split(",")) for devices in given)


def test_only_rollout_has_the_gpus_of_its_engines_and_a_no_op_trainer() -> None:
    topology = half(DISAGGREGATED, "run.only=rollout")
    assert gpus(topology) == 8
    assert {name: node.gpus for name, node in topology.nodes.items()} == {"n0": 0, "n1": 8}
    found = processes(topology)
    assert found["n1"] == [f"engine.policy.{index}" for index in range(8)]
    assert found["n0"] == ["no-op-trainer", "rollout", "reward", "filter", "buffer"]
    drawn = draw(topology, plan_of(topology, {}))
    assert "trainer  none: only rollout, on the same weights throughout" in drawn


def test_only_rollout_takes_no_turns_with_a_trainer_that_is_not_there() -> None:
    topology = half(COLOCATED, "run.only=rollout", "rollout.max_staleness=2", "engines.policy.weight_transport=ipc")
    assert (gpus(topology), num_engines(topology.engines["policy"])) == (8, 8)
    assert topology.engines["policy"].colocate is None
    assert topology.engines["policy"].weight_transport == "disk"
    smaller = half(COLOCATED, "run.only=rollout", "engines.policy.gpus=n0:0-1")
    assert smaller.nodes["n0"].gpus == 2


def test_only_trainer_has_the_gpus_of_its_ranks_and_nobody_who_generates_or_grades(tmp_path: Path) -> None:
    topology = half(DISAGGREGATED, "run.only=trainer", f"run.load={tmp_path}")
    assert (gpus(topology), num_ranks(topology.trainer)) == (8, 8)
    assert list(topology.nodes) == ["n0"]
    assert (topology.engines, topology.eval) == ({}, ())
    assert processes(topology)["n0"] == [*(f"trainer.{rank}" for rank in range(8)), "rollout", "filter", "buffer"]
    assert f"samples  from the dump in {tmp_path}, no engines" in draw(topology, plan_of(topology, {}))


def test_only_trainer_has_no_groups_of_a_dump_to_spare(tmp_path: Path) -> None:
    overrides = ("run.only=trainer", f"run.load={tmp_path}", "rollout.on_surplus=drop")
    assert load_topology(TOPOLOGIES / "laptop.toml", overrides).topology.rollout.on_surplus == "train"


def test_only_trainer_keeps_the_reference_that_engines_would_serve(tmp_path: Path) -> None:
    pool = 'engines.ref={kind = "tiny", hf_checkpoint = "demo/models/reverse-digits"}'
    overrides = ("algorithm.kl.loss_coef=0.1", pool)
    assert half(LAPTOP, *overrides).model.ref_load is None
    alone = half(LAPTOP, *overrides, "run.only=trainer", f"run.load={tmp_path}")
    assert alone.model.ref_load == str(TOPOLOGIES / "demo/models/reverse-digits")


def test_a_whole_topology_stays_as_it_is() -> None:
    topology = half(DISAGGREGATED)
    assert {name: node.gpus for name, node in topology.nodes.items()} == {"n0": 8, "n1": 8}
    assert len(parse_gpus(topology.engines["policy"].gpus)) == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.only=trainer"], r"run\.load: missing: .* the directory of a dump"),
        (["run.load=dump"], r'run\.load = "dump": has no effect without run\.only = "trainer"'),
        (["run.only=rollout", "run.load=dump"], r'run\.load = "dump": has no effect without'),
        (["run.only=filter"], r"run\.only = \"filter\": .*'rollout', 'trainer'"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        half(LAPTOP, *overrides)
