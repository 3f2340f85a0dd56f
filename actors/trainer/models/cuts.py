"""Weights cut for this rank: of projections that Megatron joins, each rank has a part of both."""

from typing import Any, Final

import torch
from torch import Tensor

from actors.trainer.megatron.build import expert_biases
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.names import joined_for_megatron
from actors.trainer.models.sources import Cut, WeightSource

EXPERT: Final = "mlp.experts.local_experts."


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
    for name, parameter in tensors_of(built):
        (own,) = names_of(global_name(name, built), model, parallel_state.get_expert_model_parallel_rank())
        part = rank_part(own, model, source, cut_of(name, parameter))
        if part.shape != parameter.shape:
            raise ValueError(f"{name}: the weights have shape {tuple(part.shape)}, the model {tuple(parameter.shape)}")
        parameter.copy_(part)


def tensors_of(built: Any) -> list[tuple[str, Any]]:
    """What a rank's GPTModel has of the checkpoint, by Megatron's names: parameters, and the biases of experts."""
    return [*built.named_parameters(), *expert_biases(built)]


def is_of_expert(name: str) -> bool:
    """Whether a tensor is one expert's, which some ranks have alone."""
    return EXPERT in name


def names_of(name: str, model: HfConfig, *ranks: int) -> tuple[str, ...]:
    """What some expert-parallel ranks have under one name: each numbers its experts from 0, the file numbers all."""
    before, expert, after = name.partition(EXPERT)
    if not expert or model.experts is None:
        return (name,)
    number, rest = after.split(".", 1)
    of_each = model.experts.num_experts // parallel_state.get_expert_model_parallel_world_size()
    return tuple(f"{before}{EXPERT}{int(number) + rank * of_each}.{rest}" for rank in ranks)


def global_name(name: str, built: Any) -> str:
    """Layers are numbered within a pipeline stage; the file numbers them through."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(built.decoder.layers[int(parts[2])].layer_number - 1)
    if parts[0] == "mtp":  # behind the decoder's, which a layer of it is like inside
        inside = parts[4:] if parts[3] == "transformer_layer" else parts[3:]
        parts = ["decoder", "layers", str(built.config.num_layers + int(parts[2])), *inside]
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


def cut_of(name: str, parameter: Any) -> Cut | None:
    """Which part of a tensor this rank has; none: all of it."""
    kind = "expert_tensor" if is_of_expert(name) else "tensor_model"
    group: Any = getattr(parallel_state, f"get_{kind}_parallel_group")()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Cut(parameter.partition_dim, group.rank(), group.size())
