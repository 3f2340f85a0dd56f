"""What the schema knows and a run would not do yet: refused, rather than something else done."""

from collections.abc import Iterator

from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology, answers_are_recorded


def not_built(topology: Topology) -> Iterator[Problem]:
    """Every key that asks for what is not built."""
    if len(topology.nodes) > 1:
        yield Problem.of("nodes", list(topology.nodes), "a run on several nodes is not built yet; one is")
    if topology.algorithm.use_rollout_routing_replay and not answers_are_recorded(topology):
        message = (
            'engines are not asked for experts yet: it trains on a dump that tells them, with run.only = "trainer"'
        )
        yield Problem.of("algorithm.use_rollout_routing_replay", True, message)
