"""Which nodes cannot take part, by the facts that all nodes state."""

from typing import Any

import msgspec

from runtime.node.checks.comparison import compare
from runtime.node.checks.facts import OWN, TORCH, NodeFacts, facts_here
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology
from tests.build.topology import topology_with

NODES: dict[str, Any] = {name: {} for name in ("n0", "n1", "n2")}
POOL: dict[str, Any] = {"kind": "tiny", "nodes": ["n1", "n2"], "num_engines": 2, "weight_transport": "collective"}


def topology(
    *, machines: dict[str, Any] = NODES, trainer: dict[str, Any] | None = None, copies: int = 1, **pool: Any
) -> Topology:
    return topology_with(
        nodes=machines,
        bus={"node": "n0"},
        trainer=trainer or {"device": "cpu"},
        train={"checkpoint_copies": copies},
        engines={"policy": POOL | pool},
    )


def facts(of: Topology, *, common_file: str = "h", **changes: Any) -> NodeFacts:
    own = NodeFacts(common_file=common_file, gpus=8, settings=msgspec.to_builtins(of))
    return msgspec.structs.replace(own, **changes)


def refusals(of: Topology, **by_node: NodeFacts) -> list[str]:
    return [str(refusal) for refusal in compare(of, {"n0": facts(of)} | by_node)]


def test_nodes_with_the_same_facts_are_accepted() -> None:
    of = topology()
    same = {OWN: "1, source a", TORCH: "2.13.0"}
    assert refusals(of, n0=facts(of, versions=same), n1=facts(of, versions=same), n2=facts(of)) == []


def test_another_version_is_refused_by_package_and_by_the_node_that_has_it() -> None:
    of = topology()
    first, other = facts(of, versions={OWN: "1", TORCH: "2"}), facts(of, versions={OWN: "2", TORCH: "2"})
    assert refusals(of, n0=first, n1=other) == [
        'node n1: physarum = "2": node n0 has 1; install one version on all nodes'
    ]
    other = facts(of, versions={OWN: "1", TORCH: "3"})
    assert refusals(of, n0=first, n1=other, n2=first) == [
        'node n1: torch = "3": node n0 has 2; install one version on all nodes'
    ]


def test_of_two_engine_nodes_with_other_sglang_the_later_one_is_refused() -> None:
    of = topology(kind="sglang", python="/opt/sglang/bin/python")
    one, two = (facts(of, versions={"sglang.policy": version}) for version in ("0.5.1", "0.5.2"))
    assert refusals(of, n2=two, n1=one) == [
        'node n1: engines.policy.python = "/opt/sglang/bin/python": its SGLang is 0.5.1, and that of node n2 is 0.5.2; '
        "install one version on all nodes"
    ]


def test_too_few_gpus_are_refused_once() -> None:
    of = topology(machines=NODES | {"n1": {"gpus": 8}})
    assert refusals(of, n1=facts(of, gpus=2)) == ["node n1: nodes.n1.gpus = 8: this machine has 2 GPUs"]
    stated = Problem.of("nodes.n1.gpus", 8, "this machine has 2 GPUs for this process")
    assert len(refusals(of, n1=facts(of, gpus=2, problems=(stated,)))) == 1


def test_the_problems_of_a_node_s_own_checks_refuse_it() -> None:
    of = topology()
    missing = Problem(key="model.hf_checkpoint", value='"/models/a"', file="x.toml", message="no such directory")
    assert refusals(of, n1=facts(of, problems=(missing,)), n2=facts(of)) == [
        'node n1: x.toml: model.hf_checkpoint = "/models/a": no such directory'
    ]


def test_disk_without_a_common_directory_is_refused_where_engines_run() -> None:
    of = topology(weight_transport="disk", nodes=["n1"], num_engines=1)
    found = refusals(of, n1=facts(of, common_file=""), n2=facts(of, common_file="another"))
    assert found == [
        'node n1: engines.policy.weight_transport = "disk": runs/t is not the directory of node n0 here; use a common '
        'directory (run.dir), or weight_transport = "http" or "collective"'
    ]
    assert refusals(topology(), n1=facts(topology(), common_file="")) == []


def test_a_trainer_on_several_nodes_without_a_common_directory_is_refused() -> None:
    nodes = {name: {"gpus": 8} for name in NODES}
    of = topology(machines=nodes, trainer={"gpus": "n0:0-7,n1:0-7"})
    [found] = refusals(of, n1=facts(of, common_file=""), n2=facts(of, common_file=""))
    assert found.startswith('node n1: trainer.gpus = "n0:0-7,n1:0-7": runs/t is not the directory of node n0 here')

    copied = topology(machines=nodes, trainer={"gpus": "n0:0-7,n1:0-7"}, copies=2)
    assert refusals(copied, n1=facts(copied, common_file=""), n2=facts(copied, common_file="")) == []
    [found] = refusals(copied, n1=facts(copied), n2=facts(copied, common_file=""))
    assert found.startswith("node n1: train.checkpoint_copies = 2: has the run directory of home")


def test_what_a_node_would_fetch_is_refused_only_if_home_cannot_give_it() -> None:
    of = topology()
    home = facts(of, gives={"model.hf_checkpoint": "3 files, 12 MiB"})
    assert refusals(of, n0=home, n1=facts(of, lacks=("model.hf_checkpoint",))) == []
    [found] = refusals(of, n0=home, n1=facts(of, lacks=("rollout.dynamic_filter",)))
    assert found == 'node n1: rollout.dynamic_filter = "": is not here, and home cannot give it'


def test_another_topology_is_refused_by_its_keys_and_paths_may_differ() -> None:
    of, other = (
        topology(),
        topology_with(
            nodes=NODES,
            bus={"node": "n0"},
            trainer={"device": "cpu"},
            engines={"policy": POOL},
            train={"num_steps": 5},
            run={"name": "t", "dir": "/elsewhere/runs"},
            model={"hf_checkpoint": "/elsewhere/model"},
        ),
    )
    home = msgspec.structs.replace(facts(of), settings=msgspec.to_builtins(of))
    assert refusals(of, n0=home, n1=facts(other)) == [
        "node n1: train.num_steps = 5: home has 3; start all nodes with one topology and the same --set"
    ]


def test_two_models_of_a_hub_are_no_paths() -> None:
    settings = [{"model": {"hf_checkpoint": name}} for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")]
    home, other = (msgspec.structs.replace(facts(topology()), settings=each) for each in settings)
    [found] = refusals(topology(), n0=home, n1=other)
    assert found.startswith('node n1: model.hf_checkpoint = "Qwen/Qwen3-8B": home has "Qwen/Qwen3-0.6B"')


def test_facts_of_this_machine_name_the_packages_that_the_node_needs() -> None:
    of = topology()
    here = facts_here(of, "n1", address="10.0.0.1")
    assert set(here.versions) == {OWN, TORCH}
    assert here.versions[OWN].startswith("0.2.0.dev0, source ")
    assert here.address == "10.0.0.1"
    assert set(facts_here(topology(nodes=["n2"], num_engines=1), "n1").versions) == {OWN}
    assert msgspec.json.decode(msgspec.json.encode(here), type=NodeFacts) == here
