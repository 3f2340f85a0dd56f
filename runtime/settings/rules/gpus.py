"""GPU rules: they exist, are assigned once, and fit the layout and the engines."""

from collections.abc import Iterator
from itertools import combinations
from typing import Final

import msgspec

from runtime.settings.gpus import Gpu, parse_gpus, show_gpus
from runtime.settings.placement import data_parallel_size, num_ranks
from runtime.settings.reading.config import Problem
from runtime.settings.recipe import Recipe
from runtime.settings.tables.trainer import CriticRanksConfig, MegatronConfig, TrainerConfig
from runtime.settings.topology import Topology, critic_has_ranks, critic_topology

OF_CRITIC: Final = "trainer.critic"  # table of the critic's own ranks


def gpu_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of GPU lists: not parseable, GPUs that do not exist, or lists without effect."""
    yield from _gpus_exist(topology)
    yield from _trainer(topology)
    yield from _critic_ranks(topology)


def fit_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of layouts and engine sizes that do not fit the GPUs. All GPU lists must be parseable."""
    for rule in (_layout, _critic_layout, _engine_sizes, _booking, _colocation):
        yield from rule(topology)


def _gpus_exist(topology: Topology) -> Iterator[Problem]:
    for key, text in _gpu_lists(topology):
        try:
            gpus = parse_gpus(text)
        except ValueError as error:
            yield Problem.of(key, text, f'{error}; allowed: such as "n0:0-7,n1:0-3"')
            continue
        unknown = {gpu.node for gpu in gpus} - topology.nodes.keys()
        for node in sorted(unknown):
            yield Problem.of(key, text, f"no node {node}; allowed: {', '.join(topology.nodes)}")
        beyond = [gpu for gpu in gpus if gpu.node not in unknown and gpu.index >= topology.nodes[gpu.node].gpus]
        if beyond:
            counts = ", ".join(f"nodes.{node}.gpus = {topology.nodes[node].gpus}" for node in _nodes(beyond))
            yield Problem.of(key, text, f"there is no GPU {show_gpus(beyond)}: {counts}")
        if len(set(gpus)) < len(gpus):
            yield Problem.of(key, text, "lists a GPU twice")


def _gpu_lists(topology: Topology) -> Iterator[tuple[str, str]]:
    """Yield key and text of every GPU list."""
    if topology.trainer.gpus is not None:
        yield "trainer.gpus", topology.trainer.gpus
    if topology.trainer.critic.gpus is not None:
        yield f"{OF_CRITIC}.gpus", topology.trainer.critic.gpus
    for name, engine in topology.engines.items():
        if engine.gpus is not None:
            yield f"engines.{name}.gpus", engine.gpus


def _trainer(topology: Topology) -> Iterator[Problem]:
    trainer = topology.trainer
    if trainer.device == "cuda" and trainer.gpus is None:
        yield Problem(key="trainer.gpus", message='missing: the trainer\'s GPUs, such as "n0:0-7"; or device = "cpu"')
    if trainer.device == "cpu" and trainer.gpus is not None:
        yield Problem.of("trainer.gpus", trainer.gpus, 'has no meaning with trainer.device = "cpu"')
    if trainer.device == "cuda" and trainer.num_processes > 1:
        yield Problem.of(
            "trainer.num_processes",
            trainer.num_processes,
            'has no meaning with trainer.device = "cuda": each GPU has one rank',
        )


def _critic_ranks(topology: Topology) -> Iterator[Problem]:
    """Yield problems of the critic's own ranks: on another device than the actor's, or without effect."""
    trainer, own = topology.trainer, topology.trainer.critic
    if own.are_set and not critic_has_ranks(topology):
        message = 'has no effect without a critic: algorithm.estimator.type = "ppo"'
        yield Problem(key=OF_CRITIC, message=message)
    if not own.are_set and own != CriticRanksConfig():
        needed = f"{OF_CRITIC}.gpus" if trainer.device == "cuda" else f"{OF_CRITIC}.num_processes"
        yield Problem(key=OF_CRITIC, message=f"has no effect without ranks of the critic's own: set {needed}")
    if trainer.device == "cpu" and own.gpus is not None:
        yield Problem.of(f"{OF_CRITIC}.gpus", own.gpus, 'has no meaning with trainer.device = "cpu"')
    if trainer.device == "cuda" and own.num_processes:
        message = f'has no meaning with trainer.device = "cuda": set {OF_CRITIC}.gpus, each GPU has one rank'
        yield Problem.of(f"{OF_CRITIC}.num_processes", own.num_processes, message)
    if own.megatron.mtp_num_layers:
        message = "the critic has no MTP layers, which predict tokens"
        yield Problem.of(f"{OF_CRITIC}.megatron.mtp_num_layers", own.megatron.mtp_num_layers, message)


def _critic_layout(topology: Topology) -> Iterator[Problem]:
    """Yield problems of a layout of the critic's own, as of the actor's."""
    if not critic_has_ranks(topology):
        return
    for problem in _layout(critic_topology(topology)):
        if problem.key.startswith("trainer.megatron"):
            key, message = (
                text.replace("trainer.megatron", f"{OF_CRITIC}.megatron").replace("the trainer's", "the critic's")
                for text in (problem.key, problem.message)
            )
            yield msgspec.structs.replace(problem, key=key, message=message)


def _layout(topology: Topology) -> Iterator[Problem]:
    layout, ranks = topology.trainer.megatron, num_ranks(topology.trainer)
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    dense = tensor * pipeline * layout.context_parallel_size
    expert = layout.expert_model_parallel_size * (layout.expert_tensor_parallel_size or tensor) * pipeline
    if ranks % dense:
        message = f"tensor x pipeline x context = {dense} does not divide the trainer's {ranks} ranks"
        yield Problem(key="trainer.megatron", message=message)
    elif (in_step := _samples_per_step(topology)) % data_parallel_size(topology.trainer):
        message = (
            f"{data_parallel_size(topology.trainer)} data-parallel replicas do not divide "
            f"the {in_step} samples of an optimizer step"
        )
        yield Problem(key="trainer.megatron", message=message)
    if layout.expert_model_parallel_size > 1 and ranks % expert:
        message = f"expert x expert-tensor x pipeline = {expert} does not divide the trainer's {ranks} ranks"
        yield Problem(key="trainer.megatron.expert_model_parallel_size", message=message)
    if layout.sequence_parallel and tensor == 1:
        yield Problem.of(
            "trainer.megatron.sequence_parallel", True, "needs trainer.megatron.tensor_model_parallel_size above 1"
        )
    yield from _dispatcher(layout)
    yield from _stages(topology.trainer)
    yield from _recomputation(layout)
    yield from _mtp_layers(topology.trainer)


def _dispatcher(layout: MegatronConfig) -> Iterator[Problem]:
    """Yield problems of "allgather", which needs the same number of tokens on each rank."""
    tensor = layout.tensor_model_parallel_size
    if layout.moe_token_dispatcher_type != "allgather":
        return
    key = "trainer.megatron.moe_token_dispatcher_type"
    if layout.pipeline_model_parallel_size > 1:
        yield Problem.of(
            key, "allgather", 'needs micro-batches of one length, and those of a pipeline differ; allowed: "alltoall"'
        )
    sharing = layout.expert_model_parallel_size * (layout.expert_tensor_parallel_size or tensor)
    if sharing > tensor * layout.context_parallel_size:
        message = 'needs micro-batches of one length, and replicas that share experts differ; allowed: "alltoall"'
        yield Problem.of(key, "allgather", message)


def _stages(trainer: TrainerConfig) -> Iterator[Problem]:
    layout = trainer.megatron
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    key = "trainer.megatron.virtual_pipeline_model_parallel_size"
    if virtual > 1 and pipeline == 1:
        yield Problem.of(key, virtual, "needs trainer.megatron.pipeline_model_parallel_size above 1")
    if virtual > 1 and pipeline == 2 and trainer.device == "cpu":
        message = (
            "2 pipeline ranks cannot be interleaved on the CPU, where gloo mixes up their messages; allowed: 3 or more"
        )
        yield Problem.of(key, virtual, message)
    if trainer.ddp.overlap_param_gather and not trainer.optimizer.use_distributed_optimizer:
        message = "needs trainer.optimizer.use_distributed_optimizer, which shards the parameters that are gathered"
        yield Problem.of("trainer.ddp.overlap_param_gather", True, message)
    if trainer.ddp.overlap_param_gather and not trainer.ddp.overlap_grad_reduce:
        yield Problem.of("trainer.ddp.overlap_param_gather", True, "needs trainer.ddp.overlap_grad_reduce")
    if trainer.ddp.pad_buckets_for_high_nccl_busbw and not trainer.optimizer.use_distributed_optimizer:
        message = "needs trainer.optimizer.use_distributed_optimizer: buckets are padded only with it"
        yield Problem.of("trainer.ddp.pad_buckets_for_high_nccl_busbw", True, message)


def _recomputation(layout: MegatronConfig) -> Iterator[Problem]:
    key = "trainer.megatron.recompute_method"
    full, method, number = layout.recompute_granularity == "full", layout.recompute_method, layout.recompute_num_layers
    if full and (method is None or number is None):
        message = (
            'required, like recompute_num_layers, with recompute_granularity = "full"; allowed: "uniform" or "block"'
        )
        yield Problem.of(key, method, message)
    if not full and (method is not None or number is not None):
        name, value = ("recompute_method", method) if method is not None else ("recompute_num_layers", number)
        yield Problem.of(
            f"trainer.megatron.{name}", value, 'has no effect without trainer.megatron.recompute_granularity = "full"'
        )
    if layout.recompute_modules is not None and layout.recompute_granularity != "selective":
        message = 'has no effect without trainer.megatron.recompute_granularity = "selective"'
        yield Problem.of("trainer.megatron.recompute_modules", list(layout.recompute_modules), message)
    if layout.distribute_saved_activations and (not full or layout.sequence_parallel):
        message = 'needs trainer.megatron.recompute_granularity = "full" without sequence_parallel, which does the same'
        yield Problem.of("trainer.megatron.distribute_saved_activations", True, message)


def _mtp_layers(trainer: TrainerConfig) -> Iterator[Problem]:
    key, number = "trainer.megatron.mtp_num_layers", trainer.megatron.mtp_num_layers or 0
    if number > 1:
        yield Problem.of(key, number, "only one MTP layer can be trained; allowed: 1, or unset")
    if number and trainer.megatron.pipeline_model_parallel_size > 1 and trainer.ddp.overlap_grad_reduce:
        message = (
            "needs trainer.ddp.overlap_grad_reduce = false with several pipeline stages: the embedding's copy on the "
            "last stage has no gradient that an overlapped reduction could wait for"
        )
        yield Problem.of(key, number, message)


def _samples_per_step(recipe: Recipe) -> int:
    samples = recipe.rollout.rollout_batch_size * recipe.rollout.n_samples_per_prompt
    return max(1, samples // recipe.algorithm.num_steps_per_rollout)


def _engine_sizes(topology: Topology) -> Iterator[Problem]:
    for name, engine in topology.engines.items():
        gpus, size = parse_gpus(engine.gpus), engine.num_gpus_per_engine
        key = f"engines.{name}.num_gpus_per_engine"
        if not gpus:
            if size > 1 and not engine.urls:
                yield Problem.of(key, size, f"needs engines.{name}.gpus")
            continue
        on_node = {node: sum(gpu.node == node for gpu in gpus) for node in _nodes(list(gpus))}
        if len(gpus) % size:
            yield Problem.of(key, size, f"does not divide the pool's {len(gpus)} GPUs")
        elif any(count % size and size % count for count in on_node.values()):
            counts = ", ".join(f"{count} on {node}" for node, count in on_node.items())
            yield Problem.of(key, size, f"does not fit the GPUs per node: {counts}")


def _booking(topology: Topology) -> Iterator[Problem]:
    trainer = set(parse_gpus(topology.trainer.gpus))
    critic, own = topology.trainer.critic.gpus, set(parse_gpus(topology.trainer.critic.gpus))
    if both := own & trainer:
        message = f"{show_gpus(sorted(both))} belong to the actor: a critic on the actor's ranks has no list of its own"
        yield Problem.of(f"{OF_CRITIC}.gpus", critic, message)
    pools = {name: set(parse_gpus(engine.gpus)) for name, engine in topology.engines.items()}
    for name, gpus in pools.items():
        shared, key = gpus & trainer, f"engines.{name}.gpus"
        if shared and topology.engines[name].colocate is None:
            message = f'{show_gpus(sorted(shared))} belong to the trainer; sharing needs colocate = "trainer"'
            yield Problem.of(key, topology.engines[name].gpus, message)
        if taken := gpus & own:
            message = f"{show_gpus(sorted(taken))} belong to the critic ({OF_CRITIC}.gpus), which gives no memory away"
            yield Problem.of(key, topology.engines[name].gpus, message)
        elif topology.engines[name].colocate and gpus - trainer:
            message = f"colocated engines use the trainer's GPUs; not among them: {show_gpus(sorted(gpus - trainer))}"
            yield Problem.of(key, topology.engines[name].gpus, message)
    for first, second in combinations(pools, 2):
        if shared := pools[first] & pools[second]:
            message = f"{show_gpus(sorted(shared))} belong to engines.{first} too"
            yield Problem.of(f"engines.{second}.gpus", topology.engines[second].gpus, message)


def _colocation(topology: Topology) -> Iterator[Problem]:
    pools = {name: engine for name, engine in topology.engines.items() if engine.colocate}
    if not pools:
        return
    staleness = topology.rollout.max_staleness
    if staleness:
        message = (
            "colocated engines generate nothing while the trainer trains; allowed: 0, or engines on their own GPUs"
        )
        yield Problem.of("rollout.max_staleness", staleness, message)
    if topology.trainer.log_probs_ahead:
        message = "the trainer has no GPU memory while colocated engines generate; allowed: false"
        yield Problem.of("trainer.log_probs_ahead", True, message)
    if topology.trainer.weight_export == "async":
        message = 'has no effect with colocated engines: nothing trains while they generate; allowed: "live"'
        yield Problem.of("trainer.weight_export", "async", message)
    for name, engine in pools.items():
        if engine.urls:
            message = "a run does not release the memory of external engines; allowed: engines that the run starts"
            yield Problem.of(f"engines.{name}.colocate", engine.colocate, message)
        elif (engine.gpus is None) != (topology.trainer.gpus is None):
            message = "engines and trainer must be on the same device: both on GPUs, or both on the CPU"
            yield Problem.of(f"engines.{name}.colocate", engine.colocate, message)


def _nodes(gpus: list[Gpu]) -> list[str]:
    return list(dict.fromkeys(gpu.node for gpu in gpus))
