"""Rules of LoRA: what it cannot be combined with yet."""

from collections.abc import Iterator

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

KEY = "trainer.lora"


def lora_problems(topology: Topology) -> Iterator[Problem]:
    """Yield settings that LoRA does not support yet, and settings of adapters without a rank."""
    config, layout, algorithm = topology.trainer.lora, topology.trainer.megatron, topology.algorithm
    if not config.rank:
        for name in LoraConfig.__struct_fields__:
            if getattr(config, name) != getattr(LoraConfig(), name):
                yield Problem.of(f"{KEY}.{name}", getattr(config, name), f"has no effect without {KEY}.rank")
        return
    if config.dropout:
        yield Problem.of(f"{KEY}.dropout", config.dropout, "not implemented yet; allowed: 0")
    if trains_reward_model(topology):
        message = f"a reward model trains its value head too; not implemented yet with {KEY}.rank"
        yield Problem.of("algorithm.loss.type", algorithm.loss.type, message)
    elif trains_demonstrations(topology):
        yield Problem.of("algorithm.loss.type", algorithm.loss.type, f"not implemented yet with {KEY}.rank")
    if has_critic(topology):
        message = f"a critic trains its value head too; not implemented yet with {KEY}.rank"
        yield Problem.of("algorithm.estimator.type", algorithm.estimator.type, message)
    if keeps_teacher(algorithm):
        message = f"a second model in the trainer; not implemented yet with {KEY}.rank: serve the teacher by engines"
        yield Problem(key="algorithm.opd", message=message)
    ref_load = topology.model.ref_load
    if ref_load is not None and uses_reference(algorithm) and not reference_in_pool(topology):
        message = (
            f"a second model; not implemented yet with {KEY}.rank. Leave it out: the reference is then the model "
            f"with the adapter that training started from, which needs no copy of the weights"
        )
        yield Problem.of("model.ref_load", ref_load, message)
    for name, off in (("mtp_num_layers", None), ("moe_router_bias_update_rate", 0.0)):
        if (value := getattr(layout, name)) not in (None, off):
            yield Problem.of(
                f"trainer.megatron.{name}", value, f"changes the base model; not implemented yet with {KEY}.rank"
            )
