"""Rules of LoRA: what it cannot be combined with yet."""

from collections.abc import Iterator
from typing import Final

from runtime.settings.derived import (
    has_critic,
    keeps_teacher,
    trains_demonstrations,
    trains_reward_model,
    uses_reference,
)
from runtime.settings.reading.config import Problem
from runtime.settings.tables.trainer import LoraConfig
from runtime.settings.topology import Topology, reference_in_pool

KEY: Final = "trainer.lora"
NOT_YET: Final = f"not implemented yet with {KEY}.rank"


def lora_problems(topology: Topology) -> Iterator[Problem]:
    """Yield settings that LoRA does not support yet, and settings of adapters without a rank."""
    config = topology.trainer.lora
    if not config.rank:
        for name in LoraConfig.__struct_fields__:
            if getattr(config, name) != getattr(LoraConfig(), name):
                yield Problem.of(f"{KEY}.{name}", getattr(config, name), f"has no effect without {KEY}.rank")
        return
    if config.dropout:
        yield Problem.of(f"{KEY}.dropout", config.dropout, "not implemented yet; allowed: 0")
    yield from _objective(topology)
    yield from _other_models(topology)
    yield from _changes_of_the_base(topology)


def _objective(topology: Topology) -> Iterator[Problem]:
    loss, estimator = topology.algorithm.loss.type, topology.algorithm.estimator.type
    if trains_reward_model(topology):
        yield Problem.of("algorithm.loss.type", loss, f"a reward model trains its value head too; {NOT_YET}")
    elif trains_demonstrations(topology):
        yield Problem.of("algorithm.loss.type", loss, NOT_YET)
    if has_critic(topology):
        yield Problem.of("algorithm.estimator.type", estimator, f"a critic trains its value head too; {NOT_YET}")


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
