"""Weights cut for this rank: of projections that Megatron joins, each rank has a part of both."""

from typing import Any

import torch
from torch import Tensor

from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.names import joined_for_megatron
from actors.trainer.models.sources import Cut, WeightSource


@torch.no_grad()
def load_weights(built: Any, model: HfConfig, source: WeightSource) -> None:
    """Set every parameter of this rank.

    Args:
        built: the rank's GPTModel.
        model: what it was built from.
        source: tensors by Hugging Face name, of which only this rank's parts are asked for.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    for name, parameter in built.named_parameters():
        part = rank_part(global_name(name, built), model, source, cut_of(parameter))
        if part.shape != parameter.shape:
            raise ValueError(f"{name}: the weights have shape {tuple(part.shape)}, the model {tuple(parameter.shape)}")
        parameter.copy_(part)


def global_name(name: str, built: Any) -> str:
    """Layers are numbered within a pipeline stage; the file numbers them through."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(built.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def rank_part(name: str, model: HfConfig, source: WeightSource, cut: Cut | None) -> Tensor:
    """What a tensor-parallel rank has under Megatron's name, read without the rest.

    Args:
        name: Megatron's, with the layer's number in the whole model.
        model: its shape.
        source: of tensors by Hugging Face name.
        cut: along which dimension of the parameter which rank has its part; none: it has all.
    """
    parts = 1 if cut is None else cut.count
    return joined_for_megatron(name, model, lambda hf_name: source(hf_name, cut), parts=parts)


def cut_of(parameter: Any) -> Cut | None:
    """Which part of a parameter this rank has; none: all of it."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Cut(parameter.partition_dim, rank, size)
