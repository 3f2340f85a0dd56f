"""Weight names and layouts: Hugging Face's and Megatron's.

A matrix is [out, in] in both. Megatron fuses the query, key and value projections. With G key-value heads, the fused
rows are G groups. Each group has the query heads that share a key-value head, then the key head, then the value head.
Megatron also fuses the gate projection and the up projection, one below the other. Both number the experts of all ranks
from 0.
"""

import re
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import QKV, VALUE_BIAS, VALUE_HEAD, copies_of

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_VALUE_HEAD = {"output_layer.weight": VALUE_HEAD, "output_layer.bias": VALUE_BIAS}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "enorm.weight": "enorm.weight",  # of the MTP layer, like the next three
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_MLA = {  # MLA
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
_GATE_UP = ("gate_proj.weight", "up_proj.weight")
_MLP: Final = re.compile(  # dense MLP, routed expert, or shared expert
    r"mlp\.(?:experts\.local_(?P<expert>experts\.\d+)\.|(?P<shared>shared_experts)\.)?linear_fc(?P<half>[12])\.weight"
)


def joined_for_megatron(name: str, model: HfConfig, source: Callable[[str], Tensor], *, parts: int = 1) -> Tensor:
    """Build a Megatron tensor from Hugging Face's tensors.

    Args:
        name: Megatron name, with the layer's number in the whole model.
        model: configuration of the model.
        source: tensors by Hugging Face name: full, or the equal shards of a tensor-parallel rank.
        parts: number of shards of the key-value heads in the source.
    """
    if model.has_value_head and name in _VALUE_HEAD:
        return source(_VALUE_HEAD[name])
    if name == "output_layer.weight" and model.tie_word_embeddings:
        return source("model.embed_tokens.weight")
    if name in _TOP:
        return source(_TOP[name])
    prefix, rest = _layer_prefix(name)
    if same := _same_in_both(rest, model):
        return source(prefix + same)
    if match := _MLP.fullmatch(rest):
        prefix = _mlp_prefix(prefix, match)
        if match["half"] == "2":
            return source(f"{prefix}down_proj.weight")
        return torch.cat([source(prefix + part) for part in _GATE_UP])
    kind = rest.removeprefix("self_attention.linear_qkv.")
    groups = model.num_key_value_heads // parts
    projections = [source(f"{prefix}{projection}.{kind}") for projection in QKV]
    return torch.cat([projection.unflatten(0, (groups, -1)) for projection in projections], dim=1).flatten(0, 1)


def split_for_hf(name: str, model: HfConfig, whole: Tensor, *, parts: int = 1) -> list[tuple[str, Tensor]]:
    """Split a Megatron tensor into Hugging Face's tensors, by name.

    Args:
        name: Megatron name, with the layer's number in the whole model.
        model: configuration of the model.
        whole: the full tensor, or the equal shard of a tensor-parallel rank, which yields shards.
        parts: number of shards of the key-value heads.
    """
    if model.has_value_head and name in _VALUE_HEAD:
        return [(_VALUE_HEAD[name], whole)]
    if name in _TOP:
        return [(hf_name, whole) for hf_name in (_TOP[name], *copies_of(_TOP[name], model))]
    prefix, rest = _layer_prefix(name)
    if same := _same_in_both(rest, model):
        return [(prefix + same, whole)]
    if match := _MLP.fullmatch(rest):
        prefix = _mlp_prefix(prefix, match)
        if match["half"] == "2":
            return [(f"{prefix}down_proj.weight", whole)]
        return [(prefix + part, tensor) for part, tensor in zip(_GATE_UP, whole.chunk(2), strict=True)]
    kind = rest.removeprefix("self_attention.linear_qkv.")
    groups, size = model.num_key_value_heads, model.head_dim
    query = model.num_attention_heads // groups * size
    heads = whole.unflatten(0, (groups // parts, query + 2 * size)).split([query, size, size], dim=1)
    return [(f"{prefix}{to}.{kind}", own.flatten(0, 1)) for to, own in zip(QKV, heads, strict=True)]


def _same_in_both(rest: str, model: HfConfig) -> str | None:
    """Return the Hugging Face name of a layer's tensor that is equal in both formats. None: it is a fused tensor."""
    return (_LAYER if model.mla is None else _LAYER | _MLA).get(rest)


def _layer_prefix(name: str) -> tuple[str, str]:
    _, _, layer, rest = name.split(".", 3)
    return f"model.layers.{layer}.", rest


def _mlp_prefix(prefix: str, match: re.Match[str]) -> str:
    part = match["expert"] or match["shared"]
    return f"{prefix}mlp.{part}." if part else f"{prefix}mlp."
