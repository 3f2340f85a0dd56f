"""Size of a model, for defaults that depend on it."""

from typing import Final

from runtime.models.blocks import ModelShape

LARGE: Final = 20_000_000  # weights that a token meets; toys are below it


def is_large(shape: ModelShape) -> bool:
    """Whether a model is no toy: on the CPU it computes in several threads and, if its files say so, in bfloat16."""
    return num_met(shape) >= LARGE


def num_met(shape: ModelShape) -> int:
    """Count the weights that a token meets: the embedding, and those of each layer, with the chosen experts alone."""
    layers = (layer.weights_of_a_token(shape.hidden_size) for layer in shape.layers)
    return shape.vocab_size * shape.hidden_size + sum(layers)
