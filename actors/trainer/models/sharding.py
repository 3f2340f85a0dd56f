"""Tensor-parallel sharding: loads this rank's shards of the weights.

Megatron fuses some projections. Each rank holds a shard of every fused projection.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from actors.trainer.megatron.build import expert_biases
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.files import TensorShard, WeightSource
from actors.trainer.models.names import read_into
from actors.trainer.models.shapes import weights_of

EXPERT: Final = "mlp.experts.local_experts."
ADAPTER: Final = ".lora"  # module of a linear layer with its LoRA adapter; no tensor of the files


@torch.no_grad()
def load_weights(built: Any, model: HfConfig, source: WeightSource) -> None:
    """Set every parameter of this rank from Hugging Face weights.

    Args:
        built: the rank's GPTModel.
        model: configuration that it was built from.
        source: tensors by Hugging Face name, not in the model's own memory; called only for this rank's shards.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    for name, parameter in tensors_of(built):
        (own,) = names_of(global_name(name, built), model, parallel_state.get_expert_model_parallel_rank())
        read_part(parameter, own, model, source, cut_of(name, parameter))


def tensors_of(built: Any) -> list[tuple[str, Any]]:
    """List a GPTModel's tensors of the files by Megatron name: parameters without adapters, and expert biases."""
    named = [(name, parameter) for name, parameter in built.named_parameters() if f"{ADAPTER}." not in name]
    return [*named, *expert_biases(built)]


def is_of_expert(name: str) -> bool:
    """Whether a tensor belongs to one expert, which only some ranks hold."""
    return EXPERT in name


def names_of(name: str, model: HfConfig, *ranks: int) -> tuple[str, ...]:
    """Return the global names of a tensor on some expert-parallel ranks.

    Each rank numbers its experts from 0; the files number the experts of all ranks. Other names stay as they are.
    """
    before, expert, after = name.partition(EXPERT)
    if not expert or model.experts is None:
        return (name,)
    number, rest = after.split(".", 1)
    of_each = model.experts.num_experts // parallel_state.get_expert_model_parallel_world_size()
    return tuple(f"{before}{EXPERT}{int(number) + rank * of_each}.{rest}" for rank in ranks)


def global_name(name: str, built: Any) -> str:
    """Replace a layer's number within its pipeline stage by its number in the files."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(built.decoder.layers[int(parts[2])].layer_number - 1)
    if parts[0] == "mtp":  # MTP layers follow the decoder layers and have the same inner names
        inside = parts[4:] if parts[3] == "transformer_layer" else parts[3:]
        parts = ["decoder", "layers", str(built.config.num_layers + int(parts[2])), *inside]
    return ".".join(parts)


def read_part(target: Tensor, name: str, model: HfConfig, source: WeightSource, cut: TensorShard | None) -> None:
    """Read only a tensor-parallel rank's shard of a Megatron tensor, and no tensor of the files before it is copied.

    Args:
        target: the tensor that is set, in the shape of the shard.
        name: Megatron name, with the layer's number in the whole model.
        model: configuration of the model.
        source: tensors by Hugging Face name.
        cut: the rank's shard of the parameter; None: the rank holds the whole parameter.

    Raises:
        ValueError: a tensor has another shape than the model.
    """
    weight, parts = weights_of(model)[name], 1 if cut is None else cut.count

    def read(part: str) -> Tensor:
        if weight.is_transposed and weight.place is not None:  # Megatron-core does not share out such an expert
            return source(part, TensorShard(0, *weight.place))
        if not weight.is_stored_joined and weight.place is None:
            return source(part, cut)
        rows, stored = (weight.rows_of(part), weight.joined) if weight.is_stored_joined else (None, part)
        number = None if weight.place is None else weight.place[0]
        return source(stored, replace(cut or TensorShard(0, 0, 1), rows=rows, number=number))

    read_into(target, name, model, read, parts=parts)


def cut_of(name: str, parameter: Any) -> TensorShard | None:
    """Return the shard of a tensor that this rank holds. None: the whole tensor."""
    kind = "expert_tensor" if is_of_expert(name) else "tensor_model"
    group: Any = getattr(parallel_state, f"get_{kind}_parallel_group")()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    return TensorShard(parameter.partition_dim, group.rank(), group.size())
