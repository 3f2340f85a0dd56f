"""Whether the trainer computes a prompt once for all samples that have it, and which settings are in the way."""

from runtime.settings.derived import trains_demonstrations
from runtime.settings.topology import Topology


def in_the_way(topology: Topology) -> tuple[str, ...]:
    """Return the settings with which samples cannot share prompts. Each may be changed by itself."""
    trainer, megatron = topology.trainer, topology.trainer.megatron
    found = {
        'trainer.device = "cuda"': trainer.device == "cuda",  # its attention kernel has no mask
        "trainer.packed": trainer.packed is not None,
        "algorithm.loss": trains_demonstrations(topology),
        "algorithm.use_rollout_routing_replay": topology.algorithm.use_rollout_routing_replay,
        "trainer.megatron.moe_aux_loss_coeff": megatron.moe_aux_loss_coeff > 0,
        "trainer.megatron.moe_z_loss_coeff": bool(megatron.moe_z_loss_coeff),
        "trainer.megatron.moe_router_bias_update_rate": megatron.moe_router_bias_update_rate > 0,
        "trainer.megatron.mtp_num_layers": bool(megatron.mtp_num_layers),
    }
    return tuple(name for name, is_set in found.items() if is_set)


def shares_prompts(topology: Topology) -> bool:
    """Return whether samples with the same prompt are trained behind one copy of it."""
    wanted = topology.trainer.share_prompts
    return not in_the_way(topology) if wanted is None else wanted
