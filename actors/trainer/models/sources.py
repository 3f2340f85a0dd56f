"""Sources of weight tensors, full or one rank's shard: random, or in memory. files.py reads a directory."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import copies_of, hf_shapes


@dataclass(frozen=True)
class Cut:
    """One of the equal shards of a tensor."""

    dim: int
    index: int
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this shard of a full tensor."""
        return whole.chunk(self.count, dim=self.dim)[self.index]


class WeightSource(Protocol):
    """Returns tensors by their Hugging Face name."""

    def __call__(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return the full tensor, or a shard of it."""
        ...


def random_source(model: HfConfig, seed: int) -> WeightSource:
    """Random weights, initialised as in transformers: matrices normal, norms one, biases zero.

    Each tensor has its own generator. Its values therefore depend neither on the parallel layout nor on the order of
    calls.
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
