"""Which rollout actor drives which engine: computed from the topology alone."""

import pytest

from runtime.settings.owners import engine_owners, fewest_engines, index_of, owned_engines, rollout_places
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.runtime.settings.shipped import LAPTOP, problems

TINY = {"kind": "tiny", "concurrency": 8}


def of(rollout_nodes: list[str], **engines: object) -> Topology:
    nodes = {name: {"address": "auto"} for name in ("n0", "n1", "n2")}
    return topology_with(
        nodes=nodes, bus={"node": "n0"}, rollout={"nodes": rollout_nodes}, engines={"policy": {**TINY, **engines}}
    )


def test_without_a_setting_one_actor_at_home_drives_all_engines() -> None:
    topology = of([], num_engines=3, nodes=["n1", "n2"])
    assert rollout_places(topology) == (("rollout", "n0"),)
    assert engine_owners(topology) == (0, 0, 0)


@pytest.mark.parametrize(
    ("actors", "num_engines", "engine_nodes", "owners"),
    [
        (["n0", "n1"], 4, ["n0", "n1"], (0, 1, 0, 1)),  # each on its own node
        (["n1", "n0"], 4, ["n0", "n1"], (1, 0, 1, 0)),
        (["n0", "n0", "n1"], 5, ["n0", "n1"], (0, 2, 1, 2, 0)),  # two on n0 take its engines in turn
        (["n0", "n1"], 3, ["n2"], (0, 1, 0)),  # no actor is near: the one that has the fewest
        (["n0", "n1"], 3, ["n0", "n0", "n2"], (0, 0, 1)),
        (["n0", "n1"], 3, ["n2", "n0", "n0"], (1, 0, 0)),  # near engines are dealt before far ones
    ],
)
def test_an_engine_belongs_to_the_actor_on_its_node_or_to_the_least_loaded(
    actors: list[str], num_engines: int, engine_nodes: list[str], owners: tuple[int, ...]
) -> None:
    topology = of(actors, num_engines=num_engines, nodes=engine_nodes)
    assert engine_owners(topology) == owners
    assert [owned_engines(topology, actor) for actor in range(len(actors))] == [
        tuple(index for index, owner in enumerate(owners) if owner == actor) for actor in range(len(actors))
    ]
    assert fewest_engines(topology) == min(owners.count(actor) for actor in range(len(actors)))


def test_engines_that_run_already_are_dealt_in_turn() -> None:
    urls = [f"http://h{number}:1" for number in range(5)]
    assert engine_owners(of(["n0", "n1"], kind="sglang", urls=urls)) == (0, 1, 0, 1, 0)


def test_the_name_of_an_actor_has_its_index() -> None:
    topology = of(["n0", "n0"], num_engines=2)
    assert [index_of(place.instance) for place in rollout_places(topology)] == [0, 1]
    assert index_of("rollout") == 0


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("rollout.nodes=['other']",), "rollout.nodes", "no node other; allowed: local"),
        (
            ("rollout.nodes=['local']", "share=[['rollout','filter']]"),
            "rollout.nodes",
            'rollout actors that are placed share no process: leave "rollout" out of share',
        ),
        (
            ("rollout.nodes=['local','local']",),
            "rollout.nodes",
            "rollout.1 on local would have no engine: engines.policy has 1 engine",
        ),
    ],
)
def test_actors_that_cannot_work_are_refused_by_name(overrides: tuple[str, ...], key: str, message: str) -> None:
    assert message in problems(LAPTOP, *overrides)[key]
