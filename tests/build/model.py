"""Models and their weights."""

from collections.abc import Mapping

from torch import Tensor

from actors.trainer.models.files import TensorShard, WeightSource


def mapping_source(weights: Mapping[str, Tensor]) -> WeightSource:
    """Weights that are already in memory."""

    def read(name: str, cut: TensorShard | None = None) -> Tensor:
        return weights[name] if cut is None else cut.of(weights[name])

    return read
