"""A topology of which only one half runs: rollout without training, or training on a dump without engines. Pure."""

from collections.abc import Iterator

import msgspec

from runtime.settings.gpus import parse_gpus
from runtime.settings.placement import bus_node
from runtime.settings.reading.config import Problem
from runtime.settings.recipe import trains_demonstrations
from runtime.settings.topology import NodeConfig, Topology, TrainerConfig
from runtime.wording import show


def half_of(topology: Topology) -> Topology:
    """What is left of a topology for run.only: the other half asks for no GPU and stands in no rule.

    Only rollout: the trainer's place is taken by one light process, and engines have their GPUs for themselves. Only
    trainer: no engines and no evaluation. Nodes are left with the GPUs that are used, and without any they go, except
    the one where light actors live.
    """
    if topology.run.only == "rollout":
        engines = {
            name: msgspec.structs.replace(engine, colocate=None, weight_transport="disk", weight_format="as_trained")
            for name, engine in topology.engines.items()
        }
        half = msgspec.structs.replace(topology, engines=engines, trainer=TrainerConfig(device="cpu"))
    elif topology.run.only == "trainer":
        rollout = msgspec.structs.replace(topology.rollout, on_surplus="train")  # a dump has no groups to spare
        half = msgspec.structs.replace(topology, engines={}, eval=(), rollout=rollout)
    else:
        return topology
    try:
        return msgspec.structs.replace(half, nodes=_used_nodes(half))
    except ValueError:  # a GPU list that cannot be read, which a rule will tell
        return half


def half_problems(topology: Topology) -> Iterator[Problem]:
    """What run.only and run.load ask for and cannot have."""
    only, load = topology.run.only, topology.run.load
    if only == "trainer" and load is None:
        yield Problem(key="run.load", message='missing: with run.only = "trainer", the directory of a dump to train on')
    if load is not None and only != "trainer":
        yield Problem(key="run.load", value=show(load), message='a dump is trained on with run.only = "trainer"')
    if only is not None and trains_demonstrations(topology):
        message = 'algorithm.loss_type = "sft_loss" trains without rollout: there is no other half to leave out'
        yield Problem(key="run.only", value=show(only), message=message)


def _used_nodes(topology: Topology) -> dict[str, NodeConfig]:
    lists = [topology.trainer.gpus, *(engine.gpus for engine in topology.engines.values())]
    used = {gpu for text in lists for gpu in parse_gpus(text)}
    home = bus_node(topology) or next(iter(topology.nodes), None)
    needed = {name: max((gpu.index + 1 for gpu in used if gpu.node == name), default=0) for name in topology.nodes}
    return {
        name: msgspec.structs.replace(node, gpus=min(node.gpus, needed[name]))
        for name, node in topology.nodes.items()
        if needed[name] or name == home
    }
