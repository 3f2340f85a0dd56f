"""Models and their weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.files import TensorShard, WeightSource
from actors.trainer.models.shapes import weights_of
from actors.trainer.models.sharding import read_part


def mapping_source(weights: Mapping[str, Tensor]) -> WeightSource:
    """Weights that are already in memory."""

    def read(name: str, cut: TensorShard | None = None) -> Tensor:
        return weights[name] if cut is None else cut.of(weights[name])

    return read


def rank_part(name: str, hf: HfConfig, source: WeightSource, cut: TensorShard | None) -> Tensor:
    """A tensor-parallel rank's shard of a tensor of the trainer, in float32."""
    weight = weights_of(hf)[name]
    shapes = [shape[::-1] if weight.is_transposed else shape for shape in weight.parts.values()]
    shape = [sum(rows for rows, *_ in shapes), *shapes[0][1:]]
    if cut is not None:
        shape[cut.dim] //= cut.count
    target = torch.full(shape, torch.nan)
    read_part(target, name, hf, source, cut)
    return target
