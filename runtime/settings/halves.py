"""Runs with one half of a topology: rollout without training, or training on a dump without engines. Pure."""

from collections.abc import Iterator

import msgspec

from runtime.settings.derived import trains_demonstrations
from runtime.settings.gpus import parse_gpus
from runtime.settings.placement import bus_node
from runtime.settings.reading.config import Problem
from runtime.settings.tables.run import NodeConfig
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.topology import REFERENCE, Topology, reference_in_pool
from runtime.util.formatting import show


def half_of(topology: Topology) -> Topology:
    """Reduce a topology to the half that run.only selects. The other half needs no GPUs and is not checked.

    "rollout": a no-op trainer on the CPU replaces the trainer, and engines do not share their GPUs. "trainer": there
    are no engines and no evaluation; the trainer keeps the reference that engines would serve. Nodes keep only the GPUs
    in use. Nodes without any are removed, except the one of the light actors.
    """
    if topology.run.only == "rollout":
        engines = {
            name: msgspec.structs.replace(engine, colocate=None, weight_transport="disk", weight_format="as_trained")
            for name, engine in topology.engines.items()
        }
        half = msgspec.structs.replace(topology, engines=engines, trainer=TrainerConfig(device="cpu"))
    elif topology.run.only == "trainer":
        rollout = msgspec.structs.replace(topology.rollout, on_surplus="train")  # a dump has no surplus groups
        model = topology.model
        if reference_in_pool(topology):
            ref_load = topology.engines[REFERENCE].hf_checkpoint
            model = msgspec.structs.replace(model, ref_load=model.ref_load or ref_load)
        half = msgspec.structs.replace(topology, engines={}, eval=(), rollout=rollout, model=model)
    else:
        return topology
    try:
        return msgspec.structs.replace(half, nodes=_used_nodes(half))
    except ValueError:  # a GPU list cannot be parsed; a rule reports it
        return half


def half_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of run.only and run.load."""
    only, load = topology.run.only, topology.run.load
    if only == "trainer" and load is None:
        yield Problem(key="run.load", message='missing: run.only = "trainer" needs the directory of a dump to train on')
    if load is not None and only != "trainer":
        yield Problem(key="run.load", value=show(load), message='has no effect without run.only = "trainer"')
    if only is not None and trains_demonstrations(topology):
        message = 'algorithm.loss.type = "sft" already trains without rollout; leave run.only unset'
        yield Problem(key="run.only", value=show(only), message=message)


def _used_nodes(topology: Topology) -> dict[str, NodeConfig]:
    lists = [topology.trainer.gpus, *(engine.gpus for engine in topology.engines.values())]
    used = {gpu for text in lists for gpu in parse_gpus(text)}
    home = bus_node(topology) or next(iter(topology.nodes), None)
    pools = topology.engines.values()
    generating = topology.rollout.nodes if topology.engines else ()
    placed = {
        *topology.reward.nodes,
        *topology.trainer.nodes,
        *generating,
        *(name for pool in pools for name in pool.nodes),
    }
    needed = {name: max((gpu.index + 1 for gpu in used if gpu.node == name), default=0) for name in topology.nodes}
    return {
        name: msgspec.structs.replace(node, gpus=min(node.gpus, needed[name]))
        for name, node in topology.nodes.items()
        if needed[name] or name == home or name in placed
    }
