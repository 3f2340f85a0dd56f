"""Weights and forward pass of Qwen2, Qwen3 and Llama in plain tensor operations, in float32 or bfloat16.

Weights are stored fused, for the forward pass. `Weights.named` holds views of them by Hugging Face name, for
loading and random initialization.

Shapes: N leading dimensions (tokens, or batch x time), H heads, K KV heads, D head size, E hidden size.
"""

import hashlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.models.attention import Rope
from runtime.models.config import ModelError, ModelShape
from runtime.models.safetensors import safetensors_files

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECKSUM_DIGITS: Final = 16
SAFETENSORS_DTYPE: Final = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_STAMPS: Final = itertools.count(1)
Attend = Callable[[int, Tensor, Tensor], Tensor]  # layer, queries [N, H, D], keys and values [N, 2K, D] -> [N, H * D]


@dataclass(slots=True)
class Layer:
    """Weights of one transformer block. `qk_scale` repeats the query and key norms per head; see `Weights.settle`."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2K) * D, E]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [2, D]
    output: Tensor  # [E, H * D]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2 * intermediate, E]
    gate_up_bias: Tensor | None
    down: Tensor  # [E, intermediate]
    down_bias: Tensor | None
    qk_scale: Tensor | None = None  # [H + K, D]

    def held(self) -> dict[str, Tensor]:
        """The tensors by SGLang's names, without derived ones."""
        query, key = (None, None) if self.qk_norm is None else self.qk_norm
        held = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.qkv_proj.weight": self.qkv,
            "self_attn.qkv_proj.bias": self.qkv_bias,
            "self_attn.q_norm.weight": query,
            "self_attn.k_norm.weight": key,
            "self_attn.o_proj.weight": self.output,
            "self_attn.o_proj.bias": self.output_bias,
            "post_attention_layernorm.weight": self.mlp_norm,
            "mlp.gate_up_proj.weight": self.gate_up,
            "mlp.gate_up_proj.bias": self.gate_up_bias,
            "mlp.down_proj.weight": self.down,
            "mlp.down_proj.bias": self.down_bias,
        }
        return {name: tensor for name, tensor in held.items() if tensor is not None}


@dataclass(slots=True)
class Weights:
    """Weights of a model. `named` holds views by Hugging Face name, `dtypes` the dtype of each tensor's source."""

    config: ModelShape
    embedding: Tensor  # [vocabulary, E]
    head: Tensor  # [vocabulary, E]; the embedding itself if tied
    norm: Tensor  # [E]
    layers: list[Layer]
    named: dict[str, Tensor]
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    stamp: int = 0  # changes with the values: what was computed under another stamp is of other weights

    def settle(self) -> None:
        """Recompute derived tensors and change the stamp. Call it after the named tensors changed."""
        self.stamp = next(_STAMPS)
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        for layer in self.layers:
            if layer.qk_norm is not None:
                layer.qk_scale = layer.qk_norm.repeat_interleave(torch.tensor([heads, kv_heads]), dim=0)

    def checksums(self) -> dict[str, str]:
        """Hash the fused tensors, by SGLang's names, with SGLang's hash for the CPU."""
        data = {name: _data_of(tensor) for name, tensor in self._held().items()}
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="sums") as executor:
            return dict(zip(data, executor.map(_checksum, data.values()), strict=True))

    def _held(self) -> dict[str, Tensor]:
        held = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            held["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            held |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.held().items()}
        return held


def _data_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _checksum(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:CHECKSUM_DIGITS]


def allocate(config: ModelShape, dtype: torch.dtype = torch.float32) -> Weights:
    """Allocate weights in the dtype to compute in. Their values are undefined until they are loaded or initialized."""
    named: dict[str, Tensor] = {}

    def make(names: tuple[str, ...], rows: tuple[int, ...], *rest: int) -> Tensor:
        fused = torch.empty(sum(rows), *rest, dtype=dtype)
        named.update(zip(names, fused.split(list(rows)), strict=True))
        return fused

    embedding = make(("model.embed_tokens.weight",), (config.vocab_size,), config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = make(("lm_head.weight",), (config.vocab_size,), config.hidden_size)
    layers = [_allocate_layer(config, f"model.layers.{index}", make) for index in range(config.num_layers)]
    norm = make(("model.norm.weight",), (config.hidden_size,))
    return Weights(config=config, embedding=embedding, head=head, norm=norm, layers=layers, named=named)


def _allocate_layer(config: ModelShape, prefix: str, make: Callable[..., Tensor]) -> Layer:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_heads * size, config.num_kv_heads * size

    def names(part: str, kind: str, *members: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{part}.{member}.{kind}" for member in members)

    qkv = ("q_proj", "k_proj", "v_proj")
    gate_up = ("gate_proj", "up_proj")
    qk_norm = None
    if config.qk_norm:
        qk_norm = make(names("self_attn", "weight", "q_norm", "k_norm"), (size, size)).view(2, size)
    return Layer(
        input_norm=make((f"{prefix}.input_layernorm.weight",), (hidden,)),
        qkv=make(names("self_attn", "weight", *qkv), (wide, narrow, narrow), hidden),
        qkv_bias=make(names("self_attn", "bias", *qkv), (wide, narrow, narrow)) if config.qkv_bias else None,
        qk_norm=qk_norm,
        output=make(names("self_attn", "weight", "o_proj"), (hidden,), wide),
        output_bias=make(names("self_attn", "bias", "o_proj"), (hidden,)) if config.output_bias else None,
        mlp_norm=make((f"{prefix}.post_attention_layernorm.weight",), (hidden,)),
        gate_up=make(names("mlp", "weight", *gate_up), (inner, inner), hidden),
        gate_up_bias=make(names("mlp", "bias", *gate_up), (inner, inner)) if config.mlp_bias else None,
        down=make(names("mlp", "weight", "down_proj"), (hidden,), inner),
        down_bias=make(names("mlp", "bias", "down_proj"), (hidden,)) if config.mlp_bias else None,
    )


def load(config: ModelShape, directory: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """Read a safetensors checkpoint into new memory, in the dtype to compute in.

    Raises:
        ModelError: a file is missing or damaged, or names, shapes or dtypes do not fit the model.
    """
    weights = allocate(config, dtype)
    if config.tie_word_embeddings:
        weights.named["lm_head.weight"] = weights.embedding  # some writers store the tied head a second time
    try:
        for file in safetensors_files(directory):
            _load_file(weights, file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: {error}") from error
    missing = weights.named.keys() - weights.dtypes.keys()
    if config.tie_word_embeddings:
        missing.discard("lm_head.weight")
    if missing:
        raise ModelError(f"{directory}: {len(missing)} tensors are missing, {min(missing)} among them")
    weights.settle()
    return weights


def _load_file(weights: Weights, file: Path) -> None:
    with safe_open(file, framework="pt") as source:
        for name in source.keys():  # safe_open has keys(), but is not a mapping
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a buffer in old Llama checkpoints
            if name not in weights.named:
                raise ValueError(f"{file.name} holds {name}, which this {weights.config.architecture} does not have")
            tensor = source.get_tensor(name)
            dtype = next((spelled for spelled, known in DTYPES.items() if known is tensor.dtype), None)
            if dtype is None:
                raise ValueError(f"{file.name}: {name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES)}")
            room = weights.named[name]
            if tensor.shape != room.shape:
                raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, the model has {list(room.shape)}")
            room.copy_(tensor)
            weights.dtypes[name] = dtype


def draw(config: ModelShape, *, seed: int, std: float, dtype: str, computed_in: torch.dtype = torch.float32) -> Weights:
    """Initialize weights at random: norms 1, biases 0, others normal with `std` and rounded to `dtype`.

    Args:
        config: shape of the model.
        seed: seed of the generator.
        std: standard deviation.
        dtype: Hugging Face name of a dtype.
        computed_in: dtype of the weights in memory; the same numbers are drawn for each.
    """
    spelled = SAFETENSORS_DTYPE[dtype]
    weights = allocate(config, computed_in)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.named.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            drawn = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
            tensor.copy_(drawn.to(DTYPES[spelled]))
        weights.dtypes[name] = spelled
    weights.settle()
    return weights


def rope_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """RoPE table: cosines and signed sines of every position, [length, 2, 1, D].

    The sines of the first half are negative, so a rotation is `x * cos + roll(x, D / 2) * sin`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.factor != 1.0:
        frequencies = torch.tensor([rope.stretched(frequency) for frequency in frequencies.tolist()])
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).unsqueeze(2)


def hidden_states(weights: Weights, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """Run all blocks and the final norm.

    Args:
        weights: the model.
        x: embedded tokens, [N, E].
            cos: cosines of the tokens' positions; broadcasts against [N, H + K, D].
            sin: signed sines, likewise (`rope_table`).
            attend: stores a layer's new keys and values and computes attention.

    Returns:
        Normalized hidden states, [N, E].
    """
    config = weights.config
    size, eps = config.head_dim, config.rms_norm_eps
    num_rotated = config.num_heads + config.num_kv_heads
    heads = (*x.shape[:-1], num_rotated + config.num_kv_heads, size)
    width = (config.hidden_size,)
    for index, layer in enumerate(weights.layers):
        qkv = F.linear(F.rms_norm(x, width, layer.input_norm, eps), layer.qkv, layer.qkv_bias).view(heads)
        rotated = qkv[..., :num_rotated, :]
        normed = rotated
        if layer.qk_scale is not None:
            normed = F.rms_norm(rotated, (size,), None, eps) * layer.qk_scale
        torch.addcmul(normed * cos, normed.roll(size // 2, -1), sin, out=rotated)  # in place: keeps keys next to values
        mixed = attend(index, qkv[..., : config.num_heads, :], qkv[..., config.num_heads :, :])
        x = x + F.linear(mixed, layer.output, layer.output_bias)
        gate_up = F.linear(F.rms_norm(x, width, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
    return F.rms_norm(x, width, weights.norm, eps)


def released(weights: Weights) -> Weights:
    """Placeholder for released weights of the same model; it holds no memory."""
    nothing = torch.empty(0, dtype=weights.embedding.dtype)
    return Weights(
        config=weights.config,
        embedding=nothing,
        head=nothing,
        norm=nothing,
        layers=[],
        named={},
        dtypes=weights.dtypes,
    )


def zeros(weights: Weights) -> Weights:
    """Allocate weights of the same model, all zero; a weight update fills them later."""
    fresh = allocate(weights.config, weights.embedding.dtype)
    fresh.dtypes = dict(weights.dtypes)
    if "lm_head.weight" in fresh.dtypes:
        fresh.named.setdefault("lm_head.weight", fresh.embedding)
    for tensor in fresh.named.values():
        tensor.zero_()
    fresh.settle()
    return fresh
