"""Where whole tensors come from: drawn, or in memory. A directory as a source is in files.py."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import hf_shapes

WeightSource = Callable[[str], Tensor]  # from a Hugging Face name to the whole tensor


def random_source(model: HfConfig, seed: int) -> WeightSource:
    """Weights drawn as transformers initialises them: matrices normal, norms one, biases zero.

    Each tensor has its own generator, so that the values depend on neither the parallel layout nor the order of asking.
    """
    shapes = hf_shapes(model)

    def draw(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(shape, generator=generator) * model.initializer_range

    return draw


def mapping_source(weights: Mapping[str, Tensor]) -> WeightSource:
    """Weights that are in memory already."""
    return weights.__getitem__
