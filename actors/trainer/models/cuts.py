"""Weights cut for this rank and gathered from all: of projections that Megatron joins, each rank has a part of both."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.names import joined_for_megatron, split_for_hf
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
        part = rank_part(_global_name(name, built), model, source, _cut(parameter))
        if part.shape != parameter.shape:
            raise ValueError(f"{name}: the weights have shape {tuple(part.shape)}, the model {tuple(parameter.shape)}")
        parameter.copy_(part)


@torch.no_grad()
def export_weights(chunks: Sequence[Any], model: HfConfig) -> dict[str, Tensor]:
    """Gather the whole model under Hugging Face names. A collective: every rank calls it.

    Args:
        chunks: the rank's GPTModels.
        model: what they were built from.

    Returns:
        On rank 0 every tensor, on the CPU and contiguous; on other ranks nothing of use.
    """
    stage: dict[str, Tensor] = {}
    for built in chunks:
        for name, parameter in built.named_parameters():
            whole = _joined(name, parameter)
            if name == "output_layer.weight" and model.tie_word_embeddings:
                continue  # the last pipeline stage's copy of the embedding
            for hf_name, tensor in split_for_hf(_global_name(name, built), model, whole):
                stage[hf_name] = tensor.detach().cpu().contiguous()
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size == 1:
        return stage
    stages: list[Any] = [None] * size
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_gather_object(stages, stage, group=group)
    return {name: tensor for part in stages for name, tensor in part.items()}


def _global_name(name: str, built: Any) -> str:
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


def _cut(parameter: Any) -> Cut | None:
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Cut(parameter.partition_dim, rank, size)


def _joined(name: str, parameter: Any) -> Tensor:
    """The whole tensor, from the parts of all tensor-parallel ranks."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return parameter.data
    parts: list[Tensor] = [torch.empty_like(parameter.data) for _ in range(size)]
    dist.all_gather(parts, parameter.data.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[index] for index in range(2) for half in halves])
    return torch.cat(parts, dim=parameter.partition_dim)
