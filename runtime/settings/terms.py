"""Which samples have a term in the loss: those with an advantage of 0 have none, unless a setting gives them one.

The trainer computes no forward and backward pass for samples without a term. This module alone decides that. It lists
the settings of `[algorithm]` that add no such term; every other one that is set counts as one that does, a new one too.
"""

from typing import Final

from runtime.settings.derived import has_critic, normalizes_weights
from runtime.settings.tables.algorithm import AlgorithmConfig, CustomTis
from runtime.settings.topology import Topology

# They change advantages, denominators, or factors of the policy loss of a sample's own tokens.
WITHOUT_TERM: Final = frozenset({
    "estimator",  # a critic's values are looked at below
    "reduction",
    "rs",
    "length_penalty",
    "overlong_buffer_len",
    "overlong_penalty_factor",
    "normalize_advantages",
    "num_steps_per_rollout",
    "bypass_mode",
    "opsm_delta",
    "ref_update_interval",
    "max_log_ratio",
    "use_routing_replay",
    "use_rollout_routing_replay",
    "keep_old_actor",
    "use_rollout_logprobs",
    "reset_optimizer_states",
})  # fmt: skip
LOOKED_INTO: Final = frozenset({"loss", "kl", "tis", "entropy_coef_end"})  # it depends on their own keys or value


def terms_of_all(topology: Topology) -> tuple[str, ...]:
    """Return the settings because of which every sample needs its passes, whatever its advantage.

    Empty: a sample whose advantages are all 0 changes no gradient, and nothing reads its log-probs.
    """
    algorithm, default = topology.algorithm, AlgorithmConfig()
    named = [
        f"algorithm.{name}"
        for name in AlgorithmConfig.__struct_fields__
        if name not in WITHOUT_TERM | LOOKED_INTO and getattr(algorithm, name) != getattr(default, name)
    ]
    loss, kl, megatron = algorithm.loss, algorithm.kl, topology.trainer.megatron
    others = {
        "algorithm.loss": not loss.vanishes,
        "algorithm.entropy_coef_end": bool(algorithm.entropy_coef_end),  # 0 is another value than its default, None
        "algorithm.kl.loss_coef": kl.loss_coef > 0,
        "algorithm.kl.reward_coef": kl.reward_coef > 0,
        "algorithm.tis.batch_normalize": normalizes_weights(algorithm),
        "algorithm.tis.function": isinstance(algorithm.tis, CustomTis),
        "algorithm.estimator": has_critic(topology),
        "trainer.megatron.moe_aux_loss_coeff": megatron.moe_aux_loss_coeff > 0,
        "trainer.megatron.moe_z_loss_coeff": bool(megatron.moe_z_loss_coeff),
        "trainer.megatron.moe_router_bias_update_rate": megatron.moe_router_bias_update_rate > 0,
        "trainer.megatron.mtp_num_layers": bool(megatron.mtp_num_layers),
    }
    return (*named, *(name for name, has_term in others.items() if has_term))
