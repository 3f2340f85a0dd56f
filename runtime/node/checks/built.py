"""Settings in the schema that are not implemented yet. They are refused instead of ignored."""

from collections.abc import Iterator

from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology, answers_are_recorded


def not_built(topology: Topology) -> Iterator[Problem]:
    """Yield every setting that is not implemented yet."""
    if len(topology.nodes) > 1:
        yield Problem.of("nodes", list(topology.nodes), "a run on several nodes is not built yet; one is")
    if topology.algorithm.use_rollout_routing_replay and not answers_are_recorded(topology):
        message = (
            'engines are not asked for experts yet: it trains on a dump that tells them, with run.only = "trainer"'
        )
        yield Problem.of("algorithm.use_rollout_routing_replay", True, message)
