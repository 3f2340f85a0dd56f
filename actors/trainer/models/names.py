"""Weights under Hugging Face's names and under Megatron's.

A matrix is [out, in] on both sides. Megatron joins the query, key and value projections: for G key-value heads its rows
are G groups of the query heads that share a key-value head, then the key head, then the value head. It joins gate and
up projection one below the other. Experts are numbered through in both.
"""

import re
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import QKV, copies_of

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
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "enorm.weight": "enorm.weight",  # of the layer for further tokens, as the next three
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_LATENT = {  # of multi-latent attention
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
_GATE_UP = ("gate_proj.weight", "up_proj.weight")
_MLP: Final = re.compile(  # the layer's one, an expert, or the expert that every token goes through
    r"mlp\.(?:experts\.local_(?P<expert>experts\.\d+)\.|(?P<shared>shared_experts)\.)?linear_fc(?P<half>[12])\.weight"
)


def joined_for_megatron(name: str, model: HfConfig, source: Callable[[str], Tensor], *, parts: int = 1) -> Tensor:
    """The tensor that Megatron has under a name, from those that Hugging Face has.

    Args:
        name: Megatron's, with the layer's number in the whole model.
        model: its shape.
        source: tensors by Hugging Face name, whole or one of equal parts, as a tensor-parallel rank has them.
        parts: into how many the source cuts key-value heads.
    """
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
    """The tensors that Hugging Face has, by name, of the one that Megatron has.

    Args:
        name: Megatron's, with the layer's number in the whole model.
        model: its shape.
        whole: the tensor, or one of equal parts, as a tensor-parallel rank has it: then it yields parts.
        parts: into how many key-value heads are cut.
    """
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
    """Hugging Face's name of a layer's tensor that is no other than Megatron's."""
    return (_LAYER if model.latent is None else _LAYER | _LATENT).get(rest)


def _layer_prefix(name: str) -> tuple[str, str]:
    _, _, layer, rest = name.split(".", 3)
    return f"model.layers.{layer}.", rest


def _mlp_prefix(prefix: str, match: re.Match[str]) -> str:
    part = match["expert"] or match["shared"]
    return f"{prefix}mlp.{part}." if part else f"{prefix}mlp."
