"""Compares the facts of a run's nodes: which nodes cannot take part, and why. Pure."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runtime.node.checks.facts import SGLANG, NodeFacts
from runtime.node.claims.rundir import differing
from runtime.settings.placement import NodeRoles, bus_node, roles_of, trainer_nodes
from runtime.settings.reading.config import Problem
from runtime.settings.topology import POLICY, Topology


class Refusal(NamedTuple):
    """One reason why a node cannot take part."""

    node: str
    problem: Problem

    def __str__(self) -> str:
        return f"node {self.node}: {self.problem}"


def compare(topology: Topology, facts: Mapping[str, NodeFacts]) -> list[Refusal]:
    """Return every reason for which a node cannot take part in a run.

    Args:
        topology: of home.
        facts: by node. Home comes first, then the others in the order in which they joined: of two nodes that do not
            fit each other, the later one is refused.
    """
    return [
        Refusal(node, problem)
        for node in facts
        for problem in _problems(topology, node, facts[node], _before(node, facts))
    ]


def _before(node: str, facts: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
    nodes = list(facts)
    return {each: facts[each] for each in nodes[: nodes.index(node)]}


def _problems(topology: Topology, node: str, own: NodeFacts, before: Mapping[str, NodeFacts]) -> Iterator[Problem]:
    stated = {problem.key for problem in own.problems}
    yield from own.problems
    yield from _versions(topology, own, before)
    wanted = topology.nodes[node].gpus
    if own.gpus < wanted and f"nodes.{node}.gpus" not in stated:
        yield Problem.of(f"nodes.{node}.gpus", wanted, f"this machine has {own.gpus} GPUs")
    for home in list(before.values())[:1]:
        for key in own.lacks:
            if key not in home.gives:
                yield Problem.of(key, "", "is not here, and home cannot give it")
        yield from () if own.problems else _settings(home, own)
        if own.common_file != home.common_file:
            yield from _without_directory(topology, node, roles_of(topology, node))
        elif own.common_file and (copies := topology.train.checkpoint_copies) > 1:
            message = "has the run directory of home, where copies of one file would be one; use another run.dir, or 1"
            yield Problem.of("train.checkpoint_copies", copies, message)


def _versions(topology: Topology, own: NodeFacts, before: Mapping[str, NodeFacts]) -> Iterator[Problem]:
    for name, version in own.versions.items():
        others = ((node, facts.versions[name]) for node, facts in before.items() if name in facts.versions)
        node, other = next(others, ("", version))
        if version == other:
            continue
        if name.startswith(SGLANG):
            pool = name.removeprefix(SGLANG)
            message = f"its SGLang is {version}, and that of node {node} is {other}; install one version on all nodes"
            yield Problem.of(f"engines.{pool}.python", topology.engines[pool].python or "", message)
        else:
            yield Problem.of(name, version, f"node {node} has {other}; install one version on all nodes")


def _settings(home: NodeFacts, own: NodeFacts) -> Iterator[Problem]:
    """Yield settings that differ from home's. Paths may differ: each node finds its own files."""
    for key, of_home, of_node in differing(home.settings, own.settings):
        if not _is_path(of_home) and not _is_path(of_node):
            shown = Problem.of(key, of_home, "").value
            yield Problem.of(key, of_node, f"home has {shown}; start all nodes with one topology and the same --set")


def _is_path(value: Any) -> bool:
    """Whether a value is an absolute path: loading makes them of relative ones. Names on a hub have a slash, too."""
    return isinstance(value, str) and value.startswith("/")


def _without_directory(topology: Topology, node: str, roles: NodeRoles) -> Iterator[Problem]:
    """Yield settings that need a run directory in common with home."""
    place = Path(topology.run.dir) / topology.run.name
    why = f"{place} is not the directory of node {bus_node(topology) or 'with the streams'} here"
    for pool in roles.pools:
        if pool == POLICY and (transport := topology.engines[pool].weight_transport) == "disk":
            remedy = 'use a common directory (run.dir), or weight_transport = "http" or "collective"'
            yield Problem.of(f"engines.{pool}.weight_transport", transport, f"{why}; {remedy}")
    policy = topology.engines.get(POLICY)
    if roles.generates and POLICY not in roles.pools and policy is not None and policy.weight_transport == "disk":
        message = f"{why}, and its rollout actor compares weight files; use a common directory (run.dir)"
        yield Problem.of("rollout.nodes", list(topology.rollout.nodes), message)
    if roles.trains and len(trainer_nodes(topology)) > 1 and topology.train.checkpoint_copies == 1:
        remedy = "use a common directory (run.dir), or train.checkpoint_copies = 2"
        message = f"{why}, and the trainer's ranks save one checkpoint together; {remedy}"
        key = "nodes" if topology.trainer.gpus is None else "gpus"
        yield Problem.of(f"trainer.{key}", getattr(topology.trainer, key), message)
