"""The node of the topology that a job system started this process for: Slurm, or an indexed Job of Kubernetes."""

from collections.abc import Mapping, Sequence
from typing import Final

AUTO_NODE: Final = "auto"  # value of --node
SLURM_JOB: Final = "SLURM_JOB_ID"
SLURM_STEP: Final = "SLURM_STEP_ID"  # srun sets it for its tasks; the batch script has none
SLURM_NODE: Final = "SLURM_NODEID"  # counted from 0 in the job step
SLURM_NODES: Final = "SLURM_NNODES"
SLURM_TASK: Final = "SLURM_LOCALID"  # counted from 0 on each node
KUBERNETES_POD: Final = "JOB_COMPLETION_INDEX"  # counted from 0 in the indexed Job


class NoNode(Exception):
    """The job system names no node of the topology. The text says why, and what to do."""


def node_of_job(environment: Mapping[str, str], nodes: Sequence[str]) -> str:
    """Return the n-th node of the topology for the n-th node of a Slurm job step, or the n-th pod of a Job.

    Args:
        environment: of this process.
        nodes: names, in the order of the topology file.

    Raises:
        NoNode: no job system started this process, or its nodes do not match those of the topology.
    """
    if AUTO_NODE in nodes:
        raise NoNode(f"the topology has a node called {AUTO_NODE}: rename it, or start each node by its name")
    if SLURM_JOB in environment:
        return _node_of_slurm(environment, nodes)
    if KUBERNETES_POD in environment:
        return _nth(environment, KUBERNETES_POD, nodes, "start as many pods as the topology has nodes (completions)")
    reason = f"neither Slurm ({SLURM_NODE}) nor an indexed Job of Kubernetes ({KUBERNETES_POD}) started this process"
    raise NoNode(f"{reason}; name a node: {', '.join(nodes)}")


def _node_of_slurm(environment: Mapping[str, str], nodes: Sequence[str]) -> str:
    if SLURM_STEP not in environment:
        raise NoNode(f"this process is not a task of srun ({SLURM_STEP} is not set): start it with srun")
    submit = f"submit with --nodes={len(nodes)} --ntasks-per-node=1"
    num_nodes = _number(environment, SLURM_NODES)
    if num_nodes != len(nodes):
        counted = f"Slurm started this on {num_nodes} nodes ({SLURM_NODES}), and the topology has {len(nodes)}"
        raise NoNode(f"{counted}: {', '.join(nodes)}; {submit}")
    if _number(environment, SLURM_TASK) > 0:
        raise NoNode(f"Slurm started several tasks on one node ({SLURM_TASK}={environment[SLURM_TASK]}); {submit}")
    return _nth(environment, SLURM_NODE, nodes, submit)


def _nth(environment: Mapping[str, str], variable: str, nodes: Sequence[str], remedy: str) -> str:
    index = _number(environment, variable)
    if index >= len(nodes):
        raise NoNode(f"{variable}={index}, and the topology has {len(nodes)} nodes: {', '.join(nodes)}; {remedy}")
    return nodes[index]


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not text.isascii() or not text.isdigit():
        raise NoNode(f"{variable} is not a number: {text!r}")
    return int(text)
