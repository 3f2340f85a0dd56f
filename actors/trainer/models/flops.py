"""Floating-point operations of training, counted as in papers: matrix products, two operations per multiply-add."""

from collections.abc import Iterable
from typing import Final

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import hf_shapes

PEAK_TFLOPS: Final = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense, in bfloat16, by part of the GPU's name


def train_flops(model: HfConfig, lengths: Iterable[int]) -> float:
    """Count the operations of one forward and backward pass; the backward pass counts twice the forward pass.

    Every position passes through each layer and the head. It passes only through the experts that it is routed to.
    Attention is causal: on average, a position attends to half of its sequence. Recomputation does not count, and
    positions that skip the head count like the others.

    Args:
        model: configuration of the model.
        lengths: lengths of the sequences, in tokens.
    """
    values = model.head_dim if model.mla is None else model.mla.value_dim
    width = model.num_attention_heads * (model.head_dim + values)
    weights = _weights_of_a_token(model)
    tokens, pairs = 0, 0.0
    for length in lengths:
        tokens += length
        pairs += length * length / 2
    return 3.0 * (2.0 * weights * tokens + 2.0 * width * model.num_hidden_layers * pairs)


def _weights_of_a_token(model: HfConfig) -> float:
    """Count the matrix weights that each token is multiplied with."""
    share = model.experts.num_experts_per_tok / model.experts.num_experts if model.experts else 0.0
    count = float(model.vocab_size * model.hidden_size)  # the head's
    for name, shape in hf_shapes(model).items():
        if len(shape) == 2 and name.startswith("model.layers.") and not name.endswith("embed_tokens.weight"):
            count += shape[0] * shape[1] * (share if ".experts." in name else 1.0)
    return count


def peak_flops(device: str) -> float | None:
    """Return a GPU's peak FLOPS in bfloat16, by its name. None: unknown."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
