"""Size of a model, for defaults that depend on it."""

from typing import Final

from runtime.models.config import ModelShape

LARGE: Final = 20_000_000  # weights that a token meets; toys are below it


def is_large(shape: ModelShape) -> bool:
    """Whether a model is no toy: on the CPU it computes in several threads and, if its files say so, in bfloat16."""
    return num_met(shape) >= LARGE


def num_met(shape: ModelShape) -> int:
    """Count the weights that a token meets: the embedding, and each layer with one MLP."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    return shape.vocab_size * shape.hidden_size + shape.num_layers * layer
