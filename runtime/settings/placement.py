"""Placement derived from a topology: the bus node, the number of ranks and engines, and their GPUs."""

from runtime.settings.gpus import Gpu, order_gpus, parse_gpus
from runtime.settings.topology import EngineConfig, Topology, TrainerConfig, WeightFormat


def bus_node(topology: Topology) -> str | None:
    """Return the node whose daemon starts the NATS server; none if the run uses an existing server."""
    if topology.bus.url is not None:
        return None
    return topology.bus.node or next(iter(topology.nodes))


def home_node(topology: Topology) -> str:
    """Return the node with the bus, or the first node. The run directory belongs with the streams."""
    return bus_node(topology) or next(iter(topology.nodes))


def gpus_of(topology: Topology, text: str | None) -> tuple[Gpu, ...]:
    """Parse a GPU list into the order in which ranks and engines take its GPUs."""
    return order_gpus(parse_gpus(text), {name: node.address for name, node in topology.nodes.items()})


def num_ranks(trainer: TrainerConfig) -> int:
    """Return the number of trainer ranks."""
    return len(parse_gpus(trainer.gpus)) if trainer.gpus else trainer.num_processes


def data_parallel_size(trainer: TrainerConfig) -> int:
    """Return the number of data-parallel replicas."""
    layout = trainer.megatron
    model = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    return num_ranks(trainer) // model


def max_sample_tokens(topology: Topology) -> int:
    """Return the maximum sample length in tokens: that of a rank times the context-parallel size."""
    return topology.train.max_tokens_per_gpu * topology.trainer.megatron.context_parallel_size


def num_engines(engine: EngineConfig) -> int:
    """Return the number of engines in a pool."""
    if engine.urls:
        return len(engine.urls)
    return len(parse_gpus(engine.gpus)) // engine.num_gpus_per_engine if engine.gpus else engine.num_engines


def weight_format(topology: Topology) -> WeightFormat:
    """Return the dtype or quantization in which engines of the pool "policy" get new weights."""
    pool = topology.engines.get("policy")
    return "as_trained" if pool is None else pool.weight_format


def served_dtype(topology: Topology, engine: EngineConfig) -> str:
    """Return the dtype in which engines of a pool compute."""
    return topology.model.dtype if engine.weight_format == "as_trained" else "bfloat16"
