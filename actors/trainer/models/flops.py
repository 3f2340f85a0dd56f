"""Floating-point operations of training, as papers count them: products of matrices, two operations for each pair."""

from collections.abc import Iterable
from typing import Final

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import hf_shapes

PEAK_TFLOPS: Final = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense, in bfloat16, by a part of the GPU's name


def train_flops(model: HfConfig, lengths: Iterable[int]) -> float:
    """Of one forward and backward pass over sequences; the backward pass counts twice the forward pass.

    Every position goes through each layer and the head, of experts through those that it is routed to. Attention is
    causal: a position looks at half of its sequence. What is computed again, or left out of the head, does not count.

    Args:
        model: its shape.
        lengths: of the sequences, in tokens.
    """
    values = model.head_dim if model.latent is None else model.latent.value_dim
    width = model.num_attention_heads * (model.head_dim + values)
    weights = _weights_of_a_token(model)
    tokens, pairs = 0, 0.0
    for length in lengths:
        tokens += length
        pairs += length * length / 2
    return 3.0 * (2.0 * weights * tokens + 2.0 * width * model.num_hidden_layers * pairs)


def _weights_of_a_token(model: HfConfig) -> float:
    """Weights of matrices that each token is multiplied with."""
    share = model.experts.num_experts_per_tok / model.experts.num_experts if model.experts else 0.0
    count = float(model.vocab_size * model.hidden_size)  # the head's
    for name, shape in hf_shapes(model).items():
        if len(shape) == 2 and name.startswith("model.layers.") and not name.endswith("embed_tokens.weight"):
            count += shape[0] * shape[1] * (share if ".experts." in name else 1.0)
    return count


def peak_flops(device: str) -> float | None:
    """Of a GPU by its name, in bfloat16; none: it is not known."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
