"""Where tensors come from, whole or one rank's part: drawn, or in memory. A directory as a source is in files.py."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import copies_of, hf_shapes


@dataclass(frozen=True)
class Cut:
    """One of equal parts of a tensor."""

    dim: int
    index: int
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """That part."""
        return whole.chunk(self.count, dim=self.dim)[self.index]


class WeightSource(Protocol):
    """Gives tensors by their Hugging Face name."""

    def __call__(self, name: str, cut: Cut | None = None) -> Tensor:
        """The whole tensor, or a part of it."""
        ...


def random_source(model: HfConfig, seed: int) -> WeightSource:
    """Weights drawn as transformers initialises them: matrices normal, norms one, biases zero.

    Each tensor has its own generator, so that the values depend on neither the parallel layout nor the order of asking.
    """
    shapes = hf_shapes(model)
    copied = {copy: name for name in shapes for copy in copies_of(name, model)}

    def draw(name: str, cut: Cut | None = None) -> Tensor:
        whole = draw_whole(copied.get(name, name))
        return whole if cut is None else cut.of(whole)

    def draw_whole(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(shape, generator=generator) * model.initializer_range

    return draw


def mapping_source(weights: Mapping[str, Tensor]) -> WeightSource:
    """Weights that are in memory already."""

    def read(name: str, cut: Cut | None = None) -> Tensor:
        return weights[name] if cut is None else cut.of(weights[name])

    return read
