"""Estimated memory of a trainer rank on the CPU, and the tokens of a micro-batch that follow from it. No torch.

The constants were measured with models of 31M and 135M weights in both dtypes; docs/train/models.md has the figures.
"""

from typing import Final, NamedTuple

from actors.trainer.lora.targets import num_adapter_weights
from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import num_weights
from runtime.settings.derived import has_critic, keeps_teacher, uses_reference
from runtime.settings.placement import data_parallel_size, max_sample_tokens
from runtime.settings.prompts import shares_prompts
from runtime.settings.sizes import prompt_len_bound, show_bytes
from runtime.settings.topology import Topology, critic_has_ranks, reference_in_pool

LEAST_ACTIVATIONS: Final = 256 << 20  # bytes: what tiny models compute at a time does not depend on memory
PROGRAM: Final = 327 << 20  # bytes: Python, torch and Megatron-core, once imported
PRODUCTS: Final = 48 << 20  # bytes that oneDNN keeps for products in bfloat16 (KEPT_PRODUCTS in settings/devices.py)
HEAD_ROWS: Final = 256  # positions whose logits are computed at a time
HEAD_COPIES: Final = 3.5  # of these logits, in float32: kept ones, exponentials, gradients
# In bfloat16, bytes for each weight of the head: its gradient, the embedding's, and a reordered copy.
HALF_HEAD_BYTES: Final = 6.5
HALF_ACTIVATIONS: Final = 2 / 3  # in bfloat16, of `activation_bytes`


class RankMemory(NamedTuple):
    """Estimated bytes of a trainer rank on the CPU, at its peak."""

    program: int
    states: int  # weights, gradients, main parameters, moments, and copies of other models' weights
    activations: int  # of a micro-batch, with logits

    @property
    def total(self) -> int:
        """All of them. A checkpoint adds at most the pool of megatron/saving.py."""
        return sum(self)


def activation_bytes(model: HfConfig) -> int:
    """Estimate the activations that one token keeps for the backward pass, in bytes, without those of the head.

    A layer keeps about five vectors of the hidden size and three of the MLP's. In bfloat16 they are half of that, but
    the peak is not: copies in float32 and fragments remain.
    """
    inner, experts = model.intermediate_size, model.experts
    if experts is not None:
        inner = max(inner, experts.num_experts_per_tok * experts.size)
    return model.num_layers * (5 * model.hidden_size + 3 * inner) * 4


def tokens_by_memory(model: HfConfig) -> int:
    """Return how many tokens a micro-batch on the CPU has by default.

    Their activations take an eighth of weights, gradients and moments, or `LEAST_ACTIVATIONS`.
    """
    states = 16 * num_weights(model)
    return max(states // 8, LEAST_ACTIVATIONS) // activation_bytes(model)


def micro_batch_tokens(topology: Topology, model: HfConfig) -> int:
    """Return the largest number of tokens of a micro-batch of a rank's replica."""
    most = max_sample_tokens(topology)
    if topology.train.max_tokens_per_gpu is None and topology.trainer.device == "cpu":
        most = min(most, tokens_by_memory(model))
    return most


def rank_memory(topology: Topology, model: HfConfig) -> RankMemory:
    """Estimate the memory of one trainer rank on the CPU.

    Args:
        topology: A valid topology.
        model: The trained model.
    """
    trainer, is_half = topology.trainer, topology.model.dtype == "bfloat16"
    layout, weight = trainer.megatron, 2 if is_half else 4
    shards = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    replicas = data_parallel_size(trainer) if trainer.optimizer.use_distributed_optimizer else 1
    main = 4 if is_half else 0  # in float32 the weights themselves
    each = weight + 4 + (main + 8) / replicas
    others = uses_reference(topology.algorithm) and not reference_in_pool(topology)
    each += weight * (others + keeps_teacher(topology.algorithm))
    if topology.algorithm.keep_old_actor:
        each += weight * (topology.rollout.max_token_staleness or 0)
    if has_critic(topology) and not critic_has_ranks(topology):
        each += weight + 4 + main + 8
    tokens = min(micro_batch_tokens(topology, model), _step_tokens(topology))
    work = tokens * activation_bytes(model) * (HALF_ACTIVATIONS if is_half else 1.0)
    work += HEAD_COPIES * 4 * model.vocab_size * min(tokens, HEAD_ROWS)
    work += HALF_HEAD_BYTES * model.vocab_size * model.hidden_size if is_half else 0
    program = PROGRAM + (PRODUCTS if is_half else 0)
    states = num_weights(model) * each / shards
    if trainer.lora.rank:  # of each pair, a tensor-parallel rank has one matrix whole: counted as both
        adapters = num_adapter_weights(model, trainer.lora) / layout.pipeline_model_parallel_size
        states = num_weights(model) * weight / shards + adapters * each
    return RankMemory(program, round(states), round(work / shards))


def _step_tokens(topology: Topology) -> int:
    """Return the most input tokens of an optimizer step, over all ranks."""
    rollout, num_samples = topology.rollout, topology.rollout.n_samples_per_prompt
    prompts = 1 if shares_prompts(topology) else num_samples
    group = prompts * prompt_len_bound(topology) + num_samples * rollout.max_response_len
    return -(-rollout.rollout_batch_size * group // topology.algorithm.num_steps_per_rollout)


def checkpoint_bytes(topology: Topology, model: HfConfig) -> int:
    """Estimate the size of a checkpoint: weights, main weights and Adam's moments, of the critic too."""
    lora = topology.trainer.lora
    weights = num_adapter_weights(model, lora) if lora.rank else num_weights(model)
    each = 2 + 4 + 8 if topology.model.dtype == "bfloat16" else 4 + 8
    return weights * each * (2 if has_critic(topology) else 1)


def described(topology: Topology, model: HfConfig) -> str:
    """Say in one line how much memory each trainer rank takes."""
    found = rank_memory(topology, model)
    each = "each trainer rank" if topology.trainer.num_processes > 1 else "the trainer"
    return (
        f"memory: {each} takes about {show_bytes(found.total)}: {show_bytes(found.states)} for weights, gradients and "
        f"moments, {show_bytes(found.activations)} for activations and logits of a micro-batch, "
        f"{show_bytes(found.program)} for the program"
    )
