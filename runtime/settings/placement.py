"""Placement derived from a topology: the home node, addresses, the number of ranks and engines, and their GPUs."""

import ipaddress
import math
from collections import Counter
from typing import Final, NamedTuple, Self

from runtime.settings.gpus import Gpu, order_gpus, parse_gpus
from runtime.settings.tables.engines import EngineConfig, WeightFormat
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.topology import POLICY, Topology, answers_are_recorded, critic_has_ranks, critic_topology

AUTO: Final = "auto"
LOOPBACK: Final = "127.0.0.1"
MOST_TOKENS: Final = 9216  # of a sample on one rank, by default
BUS_PORT: Final = 4222  # of the run's own server, if other machines use it


def bus_node(topology: Topology) -> str | None:
    """Return the node whose daemon starts the NATS server; none if the run uses an existing server."""
    if topology.bus.url is not None:
        return None
    return topology.bus.node or next(iter(topology.nodes))


def outage_s(topology: Topology, node: str) -> float:
    """Return the seconds for which a node goes on without the bus; 0 on the node that runs and restarts it."""
    return 0.0 if bus_node(topology) == node else topology.bus.outage_s


def home_node(topology: Topology) -> str:
    """Return the node with the bus, or the first node. The run directory belongs with the streams."""
    return bus_node(topology) or next(iter(topology.nodes))


def is_networked(topology: Topology) -> bool:
    """Return whether servers listen for others: other nodes, external clients at an address that is not loopback, or
    external graders on this machine at one that is.
    """
    if len(topology.nodes) > 1:
        return True
    address = next(iter(topology.nodes.values())).address
    return address is not None and (not is_loopback(address) or bool(topology.reward.external))


def is_loopback(address: str) -> bool:
    """Return whether an address setting is loopback. DNS names other than localhost are not resolved."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def address_setting(topology: Topology, node: str) -> str:
    """Return the address setting of a node, with its default."""
    return topology.nodes[node].address or (AUTO if is_networked(topology) else LOOPBACK)


def bus_port(topology: Topology) -> int | None:
    """Return the port of the run's own server; None for a free port."""
    return topology.bus.port or (BUS_PORT if is_networked(topology) else None)


class NodeRoles(NamedTuple):
    """What a node does in a run, as far as its machine needs other things for it."""

    is_home: bool
    trains: bool  # it has trainer ranks
    pools: tuple[str, ...]  # pools with an engine, or a part of one, on this node
    generates: bool = False  # it has a rollout actor that drives engines

    @property
    def needs_model(self) -> bool:
        """Whether a process of the node reads the model."""
        return self.is_home or self.trains or self.generates or bool(self.pools)


def roles_of(topology: Topology, node: str) -> NodeRoles:
    """Return what a node does in a run."""
    pools = () if answers_are_recorded(topology) else topology.engines
    return NodeRoles(
        is_home=node == home_node(topology),
        trains=topology.run.only != "rollout" and node in trainer_nodes(topology),
        pools=tuple(pool for pool in pools if node in engine_nodes(topology, topology.engines[pool])),
        generates=bool(pools) and node in rollout_nodes(topology),
    )


def rollout_nodes(topology: Topology) -> tuple[str, ...]:
    """Return the node of each rollout actor, in the order of their indices. Offline rollout has one, at home."""
    return (() if answers_are_recorded(topology) else topology.rollout.nodes) or (home_node(topology),)


def engine_nodes(topology: Topology, engine: EngineConfig) -> tuple[str, ...]:
    """Return the nodes with engines of a pool; none if the engines are external."""
    return tuple(dict.fromkeys(place.node for places in engine_places(topology, engine) for place in places))


def gpus_of(topology: Topology, text: str | None) -> tuple[Gpu, ...]:
    """Parse a GPU list into the order in which ranks and engines take its GPUs."""
    return order_gpus(parse_gpus(text), {name: node.address or AUTO for name, node in topology.nodes.items()})


class RankPlace(NamedTuple):
    """Where a trainer rank runs."""

    node: str
    gpu: int | None  # its index on the node; None: on the CPU


def rank_places(topology: Topology) -> tuple[RankPlace, ...]:
    """Return the place of each rank of the actor, in the order of ranks. With `critic_topology`: of the critic."""
    trainer = topology.trainer
    if trainer.gpus is not None:
        return tuple(RankPlace(gpu.node, gpu.index) for gpu in gpus_of(topology, trainer.gpus))
    nodes, ranks = trainer.nodes or (home_node(topology),), trainer.num_processes
    return tuple(RankPlace(nodes[rank * len(nodes) // ranks], None) for rank in range(ranks))


def trainer_places(topology: Topology) -> tuple[RankPlace, ...]:
    """Return the place of each process of the trainer: the actor's ranks, then those that are the critic's alone."""
    own = rank_places(critic_topology(topology)) if critic_has_ranks(topology) else ()
    return (*rank_places(topology), *own)


def trainer_nodes(topology: Topology) -> tuple[str, ...]:
    """Return the nodes of the trainer's processes, that of rank 0 first."""
    return tuple(dict.fromkeys(place.node for place in trainer_places(topology)))


def weight_nodes(topology: Topology) -> tuple[str, ...]:
    """Return the nodes whose ranks write weights to files: the first rank of each pipeline stage."""
    places = rank_places(topology)
    size = max(1, len(places) // topology.trainer.megatron.pipeline_model_parallel_size)
    return tuple(dict.fromkeys(place.node for place in places[::size]))


def num_critic_ranks(topology: Topology) -> int:
    """Return the number of ranks that are the critic's alone; 0 if it has the actor's, or there is none."""
    return num_ranks(critic_topology(topology).trainer) if critic_has_ranks(topology) else 0


def num_trainer_processes(topology: Topology) -> int:
    """Return the number of the trainer's processes: ranks of the actor, and ranks of the critic alone."""
    return num_ranks(topology.trainer) + num_critic_ranks(topology)


def num_ranks(trainer: TrainerConfig) -> int:
    """Return the number of the actor's ranks."""
    return len(parse_gpus(trainer.gpus)) if trainer.gpus else trainer.num_processes


def data_parallel_size(trainer: TrainerConfig) -> int:
    """Return the number of data-parallel replicas."""
    layout = trainer.megatron
    model = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    return num_ranks(trainer) // model


def max_sample_tokens(topology: Topology) -> int:
    """Return the largest sample of the actor in tokens: that of a rank times the context-parallel size."""
    return (topology.train.max_tokens_per_gpu or MOST_TOKENS) * topology.trainer.megatron.context_parallel_size


def sample_limit(topology: Topology) -> int:
    """Return the largest number of tokens of a sample that actor and critic can train on."""
    own = max_sample_tokens(topology)
    return min(own, max_sample_tokens(critic_topology(topology))) if critic_has_ranks(topology) else own


def num_engines(engine: EngineConfig) -> int:
    """Return the number of engines in a pool."""
    if engine.urls:
        return len(engine.urls)
    return len(parse_gpus(engine.gpus)) // engine.num_gpus_per_engine if engine.gpus else engine.num_engines


class UpdateLimits(NamedTuple):
    """How long the steps of a weight update may take."""

    stall_s: float = 300.0  # seconds without progress after which a step fails
    min_load_mb_per_s: float = 100.0

    @classmethod
    def of(cls, engine: EngineConfig) -> Self:
        """Read the limits from the settings of a pool."""
        return cls(engine.update_stall_s, engine.min_load_mb_per_s)

    def load_s(self, size_bytes: int) -> float:
        """Return the limit in seconds of a step that shows no progress and reads this many bytes."""
        return self.stall_s + size_bytes / (self.min_load_mb_per_s * 1e6)


class ProcessPlace(NamedTuple):
    """Where a process of an engine runs."""

    node: str
    gpus: tuple[int, ...]  # their indices on the node; empty: on the CPU


def engine_places(topology: Topology, engine: EngineConfig) -> tuple[tuple[ProcessPlace, ...], ...]:
    """Return the places of the processes of each engine that the run starts, in the order of their ranks."""
    if engine.urls:
        return ()
    if engine.gpus is None:
        nodes = engine.nodes or (home_node(topology),)
        return tuple(_on_cpu(nodes, engine, index) for index in range(engine.num_engines))
    gpus, size = gpus_of(topology, engine.gpus), engine.num_gpus_per_engine
    return tuple(_on_gpus(gpus[at : at + size], engine.num_processes) for at in range(0, len(gpus), size))


def nodes_of_engine(places: tuple[ProcessPlace, ...]) -> tuple[str, ...]:
    """Return the nodes of an engine, that of its first process first."""
    return tuple(dict.fromkeys(place.node for place in places))


def _on_cpu(nodes: tuple[str, ...], engine: EngineConfig, index: int) -> tuple[ProcessPlace, ...]:
    """Deal the processes of one engine to its nodes in blocks. Engines take the nodes in turn."""
    width, number = engine.num_nodes_per_engine, engine.num_processes
    blocks = [index * width + rank * width // number for rank in range(number)]
    return tuple(ProcessPlace(nodes[block % len(nodes)], ()) for block in blocks)


def _on_gpus(gpus: tuple[Gpu, ...], least: int) -> tuple[ProcessPlace, ...]:
    """Deal the GPUs of one engine to at least so many processes, of equal size and each on one node."""
    share = math.gcd(len(gpus) // least, *Counter(gpu.node for gpu in gpus).values())
    parts = [gpus[at : at + share] for at in range(0, len(gpus), share)]
    return tuple(ProcessPlace(part[0].node, tuple(gpu.index for gpu in part)) for part in parts)


def weight_format(topology: Topology) -> WeightFormat:
    """Return the dtype or quantization in which engines of the pool "policy" get new weights."""
    pool = topology.engines.get(POLICY)
    return "as_trained" if pool is None else pool.weight_format


def served_dtype(topology: Topology, engine: EngineConfig) -> str:
    """Return the dtype in which engines of a pool compute."""
    return topology.model.dtype if engine.weight_format == "as_trained" else "bfloat16"
