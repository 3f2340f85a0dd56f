"""What follows from a topology's tables: where the bus is, how many ranks and engines, on which GPUs."""

from runtime.settings.gpus import Gpu, order_gpus, parse_gpus
from runtime.settings.topology import EngineConfig, Topology, TrainerConfig, WeightFormat


def bus_node(topology: Topology) -> str | None:
    """The node whose agent starts the NATS server; none if an existing one is used."""
    if topology.bus.url is not None:
        return None
    return topology.bus.node or next(iter(topology.nodes))


def home_node(topology: Topology) -> str:
    """The node with the bus, or the first one: the run's streams go with its directory."""
    return bus_node(topology) or next(iter(topology.nodes))


def gpus_of(topology: Topology, text: str | None) -> tuple[Gpu, ...]:
    """A GPU list in the order in which ranks and engines take its GPUs, however it was written."""
    return order_gpus(parse_gpus(text), {name: node.address for name, node in topology.nodes.items()})


def num_ranks(trainer: TrainerConfig) -> int:
    """Trainer processes."""
    return len(parse_gpus(trainer.gpus)) if trainer.gpus else trainer.num_processes


def data_parallel_size(trainer: TrainerConfig) -> int:
    """Replicas of the trained model."""
    layout = trainer.megatron
    model = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    return num_ranks(trainer) // model


def max_sample_tokens(topology: Topology) -> int:
    """Tokens of the longest sample that the ranks which share a sample take together."""
    return topology.train.max_tokens_per_gpu * topology.trainer.megatron.context_parallel_size


def num_engines(engine: EngineConfig) -> int:
    """Engines in a pool."""
    if engine.urls:
        return len(engine.urls)
    return len(parse_gpus(engine.gpus)) // engine.num_gpus_per_engine if engine.gpus else engine.num_engines


def weight_format(topology: Topology) -> WeightFormat:
    """In which form engines get new weights: those of the pool "policy"."""
    pool = topology.engines.get("policy")
    return "as_trained" if pool is None else pool.weight_format


def served_dtype(topology: Topology, engine: EngineConfig) -> str:
    """What engines of a pool compute in."""
    return topology.model.dtype if engine.weight_format == "as_trained" else "bfloat16"
