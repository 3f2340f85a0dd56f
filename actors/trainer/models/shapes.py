"""Tensors of a model under Hugging Face's names, their shapes, and the check that files hold them. No torch."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from actors.trainer.models.config import HfConfig
from runtime.models.attention import MlaConfig
from runtime.models.safetensors import StoredTensor, read_tensors

VALUE_HEAD: Final = "score.weight"
VALUE_BIAS: Final = "score.bias"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def hf_shapes(model: HfConfig) -> dict[str, tuple[int, ...]]:
    """Map the Hugging Face name of every tensor to its shape, in layer order. A tied output weight is left out.

    A value head has the names of transformers' classifiers with one label: of tokens with a bias, of sequences without.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for index in range(model.num_hidden_layers + model.num_mtp_layers):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        layer |= _attention(model) if model.mla is None else _mla(model, model.mla)
        layer["post_attention_layernorm.weight"] = (hidden,)
        layer |= _of_experts(model, hidden) if model.has_experts(index) else _mlp("mlp", hidden, inner)
        layer |= _mtp_tensors(hidden) if index == model.num_hidden_layers else {}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if model.has_value_head:
        return shapes | {VALUE_HEAD: (1, hidden)} | ({VALUE_BIAS: (1,)} if model.has_value_bias else {})
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes | {copy: shape for name, shape in shapes.items() for copy in copies_of(name, model)}


def num_weights(model: HfConfig) -> int:
    """Count the weights in all tensors of a model."""
    return sum(math.prod(shape) for shape in hf_shapes(model).values())


def copies_of(name: str, model: HfConfig) -> list[str]:
    """List the names under which an MTP layer repeats a top-level tensor. These copies are written and never read."""
    if not model.num_mtp_layers:
        return []
    embedding, head = (
        f"model.layers.{model.num_hidden_layers}.{own}.weight" for own in ("embed_tokens", "shared_head.head")
    )
    copies = {"model.embed_tokens.weight": [embedding], "lm_head.weight": [head]}
    if model.tie_word_embeddings:
        copies["model.embed_tokens.weight"].append(head)
    return copies.get(name, [])


def _mtp_tensors(hidden: int) -> dict[str, tuple[int, ...]]:
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return {**dict.fromkeys(norms, (hidden,)), "eh_proj.weight": (hidden, 2 * hidden)}


def _attention(model: HfConfig) -> dict[str, tuple[int, ...]]:
    size = model.head_dim
    query, key = model.num_attention_heads * size, model.num_key_value_heads * size
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in zip(QKV, (query, key, key), strict=True):
        shapes[f"{name}.weight"] = (rows, model.hidden_size)
        if model.has_qkv_bias:
            shapes[f"{name}.bias"] = (rows,)
    if model.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return shapes | {"self_attn.o_proj.weight": (model.hidden_size, query)}


def _mla(model: HfConfig, mla: MlaConfig) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of multi-latent attention (MLA)."""
    heads, hidden, rank = model.num_attention_heads, model.hidden_size, mla.key_value_rank
    query = heads * mla.head_dim
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (query, hidden)}
    if mla.query_rank is not None:
        shapes = {
            "self_attn.q_a_proj.weight": (mla.query_rank, hidden),
            "self_attn.q_a_layernorm.weight": (mla.query_rank,),
            "self_attn.q_b_proj.weight": (query, mla.query_rank),
        }
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + mla.rotated_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (mla.plain_dim + mla.value_dim), rank),
        "self_attn.o_proj.weight": (hidden, heads * mla.value_dim),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _of_experts(model: HfConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    experts = model.experts
    assert experts is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.num_experts, hidden)}
    if experts.has_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.num_experts,)
    for number in range(experts.num_experts):
        shapes |= _mlp(f"mlp.experts.{number}", hidden, experts.moe_intermediate_size)
    if experts.shared_intermediate_size:
        shapes |= _mlp("mlp.shared_experts", hidden, experts.shared_intermediate_size)
    return shapes


FLOATS: Final = ("F64", "F32", "BF16", "F16")  # dtypes of weights, as safetensors spells them
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_OF_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_ROPE_BUFFER: Final = "rotary_emb.inv_freq"  # computed from config.json; older tools wrote it
_COMPARED_BYTES: Final = 64 << 20  # compared at a time
_MAX_COMPARED_BYTES: Final = 4 << 30  # of a tied output weight, which few models have beside their embedding


def check_weights(directory: Path, model: HfConfig) -> None:
    """Reject files that hold anything other than the model's tensors.

    A model with a value head can start from a policy's files: the head may be missing, and an output layer is not read.

    Raises:
        ValueError: names the tensor that is missing, unsupported or unexpected.
        OSError: a file is missing or cannot be read.
    """
    found, expected = read_tensors(directory), hf_shapes(model)
    copies = {copy for name in expected for copy in copies_of(name, model)}  # MTP duplicates are never read
    for name, shape in expected.items():
        if name not in copies and (name in found or name not in (VALUE_HEAD, VALUE_BIAS)):
            _check_tensor(directory, name, shape, found.get(name), model)
    first = model.num_hidden_layers + model.num_mtp_layers
    unused = range(first, first + model.num_unused_mtp_layers)
    for name, tensor in found.items():
        if name not in expected:
            _check_extra(directory, name, tensor, found, model, unused)


def _check_tensor(
    directory: Path, name: str, shape: tuple[int, ...], found: StoredTensor | None, model: HfConfig
) -> None:
    if found is None:
        trained = name.startswith(f"model.layers.{model.num_hidden_layers}.")
        why = ": trainer.megatron.mtp_num_layers = 1 trains a layer that these weights lack" if trained else ""
        raise ValueError(f"{directory} has no tensor {name} in its weights{why}")
    if found.dtype not in FLOATS:
        raise ValueError(
            f"{found.file}: {name} is {found.dtype}, and config.json has no quantization_config that says how it is "
            f"scaled; allowed: {', '.join(FLOATS)}"
        )
    if found.shape != shape:
        raise ValueError(f"{found.file}: {name} is {list(found.shape)}, and {list(shape)} in the model of config.json")


def _check_extra(
    directory: Path,
    name: str,
    tensor: StoredTensor,
    found: Mapping[str, StoredTensor],
    model: HfConfig,
    unused: range,
) -> None:
    """Reject a tensor that the model lacks, except RoPE buffers, unused MTP layers and a tied output weight."""
    layer = _OF_LAYER.match(name)
    is_unused = layer is not None and int(layer[1]) in unused
    if name.endswith(_ROPE_BUFFER) or is_unused or (name == HEAD and model.has_value_head):
        return
    if name != HEAD or not model.tie_word_embeddings:
        raise ValueError(f"{tensor.file}: the model of config.json has no tensor {name}")
    _check_tied(directory, tensor, found[EMBEDDING])


def _check_tied(directory: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Reject an output weight that is not the embedding it should be tied to."""
    if head.size_bytes > _MAX_COMPARED_BYTES:
        raise ValueError(
            f"{head.file}: {HEAD} has {head.size_bytes:,} bytes beside tie_word_embeddings = true; at most "
            f"{_MAX_COMPARED_BYTES:,} are compared with {EMBEDDING}: remove the tensor"
        )
    if not _is_same(head, embedding):
        raise ValueError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but {directory / 'config.json'} "
            f"has tie_word_embeddings = true: set it to false"
        )


def _is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    ours, theirs = one.data(), other.data()
    starts = range(0, len(ours), _COMPARED_BYTES)
    return all(np.array_equal(ours[at : at + _COMPARED_BYTES], theirs[at : at + _COMPARED_BYTES]) for at in starts)
