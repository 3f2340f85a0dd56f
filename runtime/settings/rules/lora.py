"""Rules of LoRA: what it cannot be combined with yet."""

from collections.abc import Iterator
from typing import Final

from runtime.settings.derived import (
    has_critic,
    keeps_teacher,
    trains_reward_model,
    uses_reference,
)
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.trainer import LoraConfig
from runtime.settings.topology import (
    POLICY,
    Topology,
    max_adapters,
    reference_in_pool,
    serves_adapters,
    sglang_arguments,
    why_merged,
)

KEY: Final = "trainer.lora"
OF_THE_RUN: Final = ("enable_lora", "max_lora_rank", "lora_target_modules", "lora_paths")  # arguments of SGLang
NOT_YET: Final = f"not implemented yet with {KEY}.rank"


def lora_problems(topology: Topology) -> Iterator[Problem]:
    """Yield settings that LoRA does not support yet, and settings of adapters without a rank."""
    config = topology.trainer.lora
    yield from _served(topology)
    if not config.rank:
        for name in LoraConfig.__struct_fields__:
            if getattr(config, name) != getattr(LoraConfig(), name):
                yield Problem.of(f"{KEY}.{name}", getattr(config, name), f"has no effect without {KEY}.rank")
        return
    if config.dropout:
        yield Problem.of(f"{KEY}.dropout", config.dropout, "not implemented yet; allowed: 0")
    yield from _experts(topology)
    yield from _objective(topology)
    yield from _other_models(topology)
    yield from _changes_of_the_base(topology)


def _served(topology: Topology) -> Iterator[Problem]:
    pool = topology.engines.get(POLICY)
    if pool is not None and pool.serve_adapters and (merged := why_merged(topology)) is not None:
        message = f"not implemented yet where {merged.reason}; allowed: false, or {merged.allowed}"
        yield Problem.of(f"engines.{POLICY}.serve_adapters", pool.serve_adapters, message)
    if pool is not None and serves_adapters(topology):
        yield from _arguments(topology, pool)
    for name, engine in topology.engines.items():
        if name != POLICY and engine.serve_adapters is not None:
            yield Problem.of(f"engines.{name}.serve_adapters", engine.serve_adapters, f"only {POLICY} has adapters")


def _arguments(topology: Topology, pool: EngineConfig) -> Iterator[Problem]:
    """Yield arguments of SGLang by which an engine could not serve the run's adapters."""
    number = max_adapters(topology)
    least = {"max_loras_per_batch": number + 1, "max_loaded_loras": number}  # a batch may have the base model too
    for name, spelled, value in sglang_arguments(pool):
        key = f"engines.{POLICY}.sglang.{spelled}"
        if name in OF_THE_RUN:
            yield Problem.of(key, value, f"it follows from {KEY}")
        elif name in least and not (isinstance(value, int) and value >= least[name]):
            message = f"allowed: {least[name]} or more, for rollout.max_staleness = {topology.rollout.max_staleness}"
            yield Problem.of(key, value, message)


def _experts(topology: Topology) -> Iterator[Problem]:
    targets = topology.trainer.lora.of_experts
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size") if targets else ():
        if (value := getattr(topology.trainer.megatron, name)) not in (None, 1):
            message = f"not implemented yet with {targets[0]} in {KEY}.targets; allowed: 1"
            yield Problem.of(f"trainer.megatron.{name}", value, message)


def _objective(topology: Topology) -> Iterator[Problem]:
    loss, estimator = topology.algorithm.loss.type, topology.algorithm.estimator.type
    if trains_reward_model(topology):
        message = f"a reward model trains its value head too; {NOT_YET}; allowed otherwise: {KEY}.rank = 0"
        yield Problem.of("algorithm.loss.type", loss, message)
    if has_critic(topology):
        message = f'a critic trains its value head too; {NOT_YET}; allowed: an estimator without one, such as "grpo"'
        yield Problem.of("algorithm.estimator.type", estimator, message)


def _other_models(topology: Topology) -> Iterator[Problem]:
    """Yield models that the trainer would hold besides its own: it swaps adapters alone."""
    algorithm, ref_load = topology.algorithm, topology.model.ref_load
    if keeps_teacher(algorithm):
        message = f"a second model in the trainer; {NOT_YET}: serve the teacher by engines"
        yield Problem(key="algorithm.opd", message=message)
    if ref_load is not None and uses_reference(algorithm) and not reference_in_pool(topology):
        message = (
            f"a second model; {NOT_YET}. Leave it out: the reference is then the model with the adapter that training "
            f"started from, which needs no copy of the weights"
        )
        yield Problem.of("model.ref_load", ref_load, message)


def _changes_of_the_base(topology: Topology) -> Iterator[Problem]:
    for name, off in (("mtp_num_layers", None), ("moe_router_bias_update_rate", 0.0)):
        if (value := getattr(topology.trainer.megatron, name)) not in (None, off):
            yield Problem.of(f"trainer.megatron.{name}", value, f"changes the base model; {NOT_YET}")
