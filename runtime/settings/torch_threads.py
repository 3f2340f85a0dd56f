"""Number of torch threads of engines and trainer ranks on the CPU. Pure, and without torch.

The node daemon does not read the model and may run on a machine with other cores than the one that made the plan. So a
process gets its setting, or how many processes share the cores, and decides when it starts.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runtime.models.blocks import ModelShape
from runtime.models.size import is_large
from runtime.settings.placement import engine_places, trainer_places
from runtime.settings.topology import Topology, answers_are_recorded

VARIABLE: Final = "PHYSARUM_TORCH_THREADS"  # "THREADS/N": the setting or nothing, and N processes that share the cores
CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")  # of a container


def threads_of(topology: Topology, node: str, wanted: int | None) -> dict[str, str]:
    """Return the environment variable of a process that computes on the CPU of a node.

    Args:
        topology: a valid topology.
        node: name of the node.
        wanted: the setting, if there is one.
    """
    return {VARIABLE: f"{wanted or ''}/{num_sharing(topology, node)}"}


def num_sharing(topology: Topology, node: str) -> int:
    """Return the number of processes that compute on the CPU of a node at the same time.

    Without staleness trainer and engines take turns, unless the trainer computes log-probs ahead.
    """
    ranks = 0
    if topology.run.only != "rollout":
        ranks = sum(place.node == node and place.gpu is None for place in trainer_places(topology))
    engines = 0
    if not answers_are_recorded(topology):
        every = (places for pool in topology.engines.values() for places in engine_places(topology, pool))
        engines = sum(place.node == node and not place.gpus for places in every for place in places)
    takes_turns = topology.rollout.max_staleness == 0 and not topology.trainer.log_probs_ahead
    return max(1, max(ranks, engines) if takes_turns else ranks + engines)


def num_torch_threads(shape: ModelShape, environment: Mapping[str, str], cores: int) -> int:
    """Return the number of torch threads of a process: its share of the cores, or fewer if the setting says so.

    Args:
        shape: the model that it computes; by default a small one gets one thread.
        environment: its environment variables; without the variable, it gets one thread.
        cores: cores that these processes may use.
    """
    wanted, _, sharing = environment.get(VARIABLE, "1/1").partition("/")
    share = max(1, cores // int(sharing))
    if wanted:
        return min(int(wanted), share)
    return share if is_large(shape) else 1


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control group of version 2
        return cores
