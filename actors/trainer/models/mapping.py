"""Weights between Hugging Face's names and Megatron's, whole on one side and cut for this rank on the other.

A matrix is [out, in] on both sides. Megatron joins the query, key and value projections: for G key-value heads its rows
are G groups of the query heads that share a key-value head, then the key head, then the value head. It joins gate and
up projection one below the other, and each rank holds a part of both.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig

WeightSource = Callable[[str], Tensor]  # from a Hugging Face name to the whole tensor

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


def hf_shapes(model: HfConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name, in the order of the layers, without a tied output weight."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for index in range(model.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows in zip(_QKV, (query, key, key), strict=True):
            layer[f"{name}.weight"] = (rows, hidden)
            if model.has_qkv_bias:
                layer[f"{name}.bias"] = (rows,)
        if model.has_qk_norm:
            layer |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
        layer |= {
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


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


def file_source(directory: Path) -> WeightSource:
    """Weights of a model directory, read from its safetensors files one tensor at a time.

    Raises:
        ValueError: the directory has no safetensors file.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        weight_map: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
    elif single.exists():
        with safe_open(single, framework="pt") as file:
            weight_map = dict.fromkeys(file.keys(), single.name)
    else:
        raise ValueError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")

    def read(name: str) -> Tensor:
        if name not in weight_map:
            raise ValueError(f"{directory} has no tensor {name}")
        with safe_open(directory / weight_map[name], framework="pt") as file:
            return file.get_tensor(name)

    return read


def mapping_source(weights: Mapping[str, Tensor]) -> WeightSource:
    """Weights that are in memory already."""
    return weights.__getitem__


@torch.no_grad()
def load_weights(built: Any, model: HfConfig, source: WeightSource) -> None:
    """Set every parameter of this rank.

    Args:
        built: the rank's GPTModel.
        model: what it was built from.
        source: whole tensors by Hugging Face name.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    for name, parameter in built.named_parameters():
        whole = _whole(_global_name(name, built), model, source)
        part = _cut(whole, name, parameter)
        if part.shape != parameter.shape:
            raise ValueError(f"{name}: the weights have shape {tuple(part.shape)}, the model {tuple(parameter.shape)}")
        parameter.copy_(part)


@torch.no_grad()
def export_weights(built: Any, model: HfConfig) -> dict[str, Tensor]:
    """Gather the whole model under Hugging Face names. A collective: every rank calls it.

    Returns:
        On rank 0 every tensor, on the CPU and contiguous; on other ranks nothing of use.
    """
    stage: dict[str, Tensor] = {}
    for name, parameter in built.named_parameters():
        whole = _joined(name, parameter)
        if name == "output_layer.weight" and model.tie_word_embeddings:
            continue  # the last pipeline stage's copy of the embedding
        for hf_name, tensor in _split(_global_name(name, built), model, whole):
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


def _whole(name: str, model: HfConfig, source: WeightSource) -> Tensor:
    if name == "output_layer.weight" and model.tie_word_embeddings:
        return source("model.embed_tokens.weight")
    if name in _TOP:
        return source(_TOP[name])
    prefix, rest = _layer_prefix(name)
    if rest in _LAYER:
        return source(prefix + _LAYER[rest])
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([source(prefix + part) for part in _GATE_UP])
    kind = rest.removeprefix("self_attention.linear_qkv.")
    groups = model.num_key_value_heads
    parts = [source(f"{prefix}{projection}.{kind}") for projection in _QKV]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _split(name: str, model: HfConfig, whole: Tensor) -> list[tuple[str, Tensor]]:
    if name in _TOP:
        return [(_TOP[name], whole)]
    prefix, rest = _layer_prefix(name)
    if rest in _LAYER:
        return [(prefix + _LAYER[rest], whole)]
    if rest == "mlp.linear_fc1.weight":
        return [(prefix + part, tensor) for part, tensor in zip(_GATE_UP, whole.chunk(2), strict=True)]
    kind = rest.removeprefix("self_attention.linear_qkv.")
    groups, size = model.num_key_value_heads, model.head_dim
    query = model.num_attention_heads // groups * size
    parts = whole.unflatten(0, (groups, query + 2 * size)).split([query, size, size], dim=1)
    return [(f"{prefix}{to}.{kind}", part.flatten(0, 1)) for to, part in zip(_QKV, parts, strict=True)]


def _layer_prefix(name: str) -> tuple[str, str]:
    _, _, layer, rest = name.split(".", 3)
    return f"model.layers.{layer}.", rest


def _cut(whole: Tensor, name: str, parameter: Any) -> Tensor:
    """This rank's part of a whole tensor."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if "linear_fc1" in name:
        return torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])
    return whole.chunk(size, dim=parameter.partition_dim)[rank]


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
