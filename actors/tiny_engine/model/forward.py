"""Weights and forward pass of a model in plain tensor operations, in float32 or bfloat16.

Weights are stored fused, for the forward pass. `Weights.named` holds views of them by Hugging Face name, for
loading and random initialization.

Shapes: N leading dimensions (tokens, or batch x time), H heads, K KV heads, D head size, E hidden size.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.tiny_engine.model.experts import BIAS, experts_output, stacked
from runtime.models.blocks import Attention, Experts, Mlp, ModelShape, Weight, norm
from runtime.models.config import ModelError
from runtime.models.rope import Rope
from runtime.models.safetensors import safetensors_files

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECKSUM_DIGITS: Final = 16
SAFETENSORS_DTYPE: Final = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_STAMPS: Final = itertools.count(1)
# by rotary embedding: cosines and signed sines of positions, and the factor of queries there
Waves = Mapping[Rope, tuple[Tensor, Tensor, Tensor | None]]
Attend = Callable[[int, Tensor, Tensor], Tensor]  # layer, queries [N, H, D], keys and values [N, 2K, D] -> [N, H * D]


class Pair(NamedTuple):
    """The joined pairs of a LoRA adapter for one fused weight (adapters.py). R: rows of a batch."""

    a: Tensor  # [sum of ranks, in]
    b: Tensor  # [sum of ranks, out of the fused weight]
    scale: float

    def add(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add the product to the output of the linear layer, in place.

        Args:
            out: output [R, ..., out].
            x: input [R, ..., in].
            rows: those that get it; None: all.
        """
        narrow = (x if rows is None else x[rows]) @ self.a.t()
        if rows is None:
            out.view(-1, out.shape[-1]).addmm_(narrow.view(-1, narrow.shape[-1]), self.b, alpha=self.scale)
        else:
            out.index_add_(0, rows, narrow @ self.b, alpha=self.scale)


LayerRows = tuple[Mapping[str, Pair], Tensor | None]  # pairs of an adapter by name of the fused weight, with its rows
Rows = Sequence[tuple[Sequence[Mapping[str, Pair]], Tensor | None]]  # the same of all layers; None: all rows


@dataclass(slots=True)
class Layer:
    """Weights of one layer, fused, by the names of the trainer. `qk_scale` is derived; see `Weights.settle`."""

    attention: Attention
    mlp: Mlp | Experts
    held: dict[str, Tensor]
    qk_scale: Tensor | None = None  # [H + K, D]: the norms of queries and keys, per head


@dataclass(slots=True)
class Weights:
    """Weights of a model. `named` holds views by Hugging Face name, `dtypes` the dtype of each tensor's source."""

    config: ModelShape
    embedding: Tensor  # [vocabulary, E]
    head: Tensor  # [vocabulary, E]; the embedding itself if tied
    norm: Tensor  # [E]
    layers: list[Layer]
    fused: dict[str, Tensor]  # all of them by SGLang's names
    named: dict[str, Tensor]
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    stamp: int = 0  # changes with the values: what was computed under another stamp is of other weights

    def settle(self) -> None:
        """Recompute derived tensors and change the stamp. Call it after the named tensors changed."""
        self.stamp = next(_STAMPS)
        for layer in self.layers:
            if layer.attention.head_norms:
                norms = torch.stack([layer.held[f"self_attention.{kind}_layernorm.weight"] for kind in ("q", "k")])
                norms = norms.float() + 1.0 if self.config.has_centred_norms else norms
                repeats = torch.tensor([layer.attention.heads, layer.attention.kv_heads])
                layer.qk_scale = norms.repeat_interleave(repeats, dim=0)

    def checksums(self) -> dict[str, str]:
        """Hash the fused tensors, by SGLang's names, with SGLang's hash for the CPU."""
        data = {name: _data_of(tensor) for name, tensor in self.fused.items()}
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="sums") as executor:
            return dict(zip(data, executor.map(_checksum, data.values()), strict=True))


def _data_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _checksum(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:CHECKSUM_DIGITS]


def allocate(config: ModelShape, dtype: torch.dtype = torch.float32) -> Weights:
    """Allocate weights in the dtype to compute in. Their values are undefined until they are loaded or initialized."""
    fused, named = dict[str, Tensor](), dict[str, Tensor]()

    def new(name: str, *shape: int, kept: torch.dtype = dtype) -> Tensor:
        fused[name] = torch.empty(shape, dtype=kept)
        return fused[name]

    def make(weight: Weight, held: dict[str, Tensor]) -> Tensor:
        """Allocate a weight, or the stack that it belongs to, as an entry of `held`, and name the parts."""
        (weight,) = config.spelled([weight])
        rows, further = [shape[0] for shape in weight.parts.values()], next(iter(weight.parts.values()))[1:]
        place, name = stacked(weight), weight.name.lstrip(".")
        if place is None:
            kept = torch.float32 if name.endswith(BIAS) else dtype
            held[name] = tensor = new(weight.engine_name, sum(rows), *further, kept=kept)
        else:
            name = place.name.lstrip(".")
            if name not in held:
                assert config.experts is not None
                held[name] = new(place.engine_name, config.experts.num_experts, sum(rows), *further)
            tensor = held[name][place.number]
        if weight.is_stored_joined:
            named[weight.joined] = tensor
        else:
            named.update(zip(weight.parts, tensor.split(rows), strict=True))
        return tensor

    vocabulary, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    embedding = make(Weight("", {"model.embed_tokens.weight": vocabulary}), {})
    head = embedding if config.tie_word_embeddings else make(Weight("", {"lm_head.weight": vocabulary}), {})
    layers: list[Layer] = []
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.attention, Attention)  # read_tiny_engine_model refuses others
        held = dict[str, Tensor]()
        for weight in layer.weights(hidden):
            make(weight.within("", f"model.layers.{index}"), held)
        layers.append(Layer(layer.attention, layer.mlp, held))
    final = make(norm("", hidden, "model.norm"), {})
    return Weights(config=config, embedding=embedding, head=head, norm=final, layers=layers, fused=fused, named=named)


def load(
    config: ModelShape, directory: Path, dtype: torch.dtype = torch.float32, *, num_mtp_layers: int = 0
) -> Weights:
    """Read a safetensors checkpoint into new memory, in the dtype to compute in.

    Args:
        config: shape of the model.
        directory: of the checkpoint.
        dtype: dtype to compute in.
        num_mtp_layers: number of layers of the files after the last one, which are skipped.

    Raises:
        ModelError: a file is missing or damaged, or names, shapes or dtypes do not fit the model.
    """
    weights, head = allocate(config, dtype), config.name_of("lm_head.weight")
    if config.tie_word_embeddings:
        weights.named[head] = weights.embedding  # some writers store the tied head a second time
    try:
        for file in safetensors_files(directory):
            _load_file(weights, file, num_mtp_layers)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: {error}") from error
    missing = weights.named.keys() - weights.dtypes.keys()
    if config.tie_word_embeddings:
        missing.discard(head)
    if missing:
        raise ModelError(f"{directory}: {len(missing)} tensors are missing, {min(missing)} among them")
    weights.settle()
    return weights


def layer_of(name: str) -> int:
    """Layer index in a tensor's name; -1 if there is none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal() else -1


def _load_file(weights: Weights, file: Path, num_mtp_layers: int) -> None:
    num_layers = weights.config.num_layers
    with safe_open(file, framework="pt") as source:
        for name in source.keys():  # safe_open has keys(), but is not a mapping
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a buffer that older tools wrote
            if num_layers <= layer_of(name) < num_layers + num_mtp_layers or weights.config.is_copied(name):
                continue
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
    """Initialize weights at random: norms multiply by 1, biases are 0, others normal and rounded to `dtype`.

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
        if tensor.dim() == 1 and name.endswith(".weight"):
            tensor.fill_(0.0 if config.has_centred_norms else 1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            drawn = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
            tensor.copy_(drawn.to(DTYPES[spelled]))
        weights.dtypes[name] = spelled
    weights.settle()
    return weights


def rope_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """RoPE table: cosines and signed sines of every position, [length, 2, 1, D].

    A rotation is `x * cos + swapped(x) * sin`. Coordinates that are not rotated have cosine 1 and sine 0.
    """
    rotated = int(head_dim * rope.share)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / rope.theta**exponents
    if rope.is_stretched:
        frequencies = torch.tensor(rope.stretched(frequencies.tolist()))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
    if rope.is_interleaved:
        table = torch.stack((cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)), 1)
    else:
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    rest = torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(length, 2, head_dim - rotated)
    return torch.cat((table, rest), -1).unsqueeze(2)


def growth_table(rope: Rope, length: int) -> Tensor | None:
    """Factor of the queries at every position, [length, 1, 1]; None: queries do not grow."""
    if rope.growth is None:
        return None
    places = torch.arange(length, dtype=torch.float32)
    return (1 + rope.growth.beta * torch.log(1 + torch.floor(places / rope.growth.length)))[:, None, None]


def swapped(x: Tensor, rope: Rope) -> Tensor:
    """Give each rotated coordinate of heads [..., D] the other one of its plane."""
    size = x.shape[-1]
    if rope.share == 1.0 and not rope.is_interleaved:
        return x.roll(size // 2, -1)
    rotated = x[..., : int(size * rope.share)]
    if rope.is_interleaved:
        rotated = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        rotated = rotated.roll(rotated.shape[-1] // 2, -1)
    return torch.cat((rotated, x[..., rotated.shape[-1] :]), -1)


def hidden_states(weights: Weights, ids: Tensor, waves: Waves, attend: Attend, adapters: Rows = ()) -> Tensor:
    """Embed tokens, and run all blocks and the final norm.

    Args:
        weights: the model.
        ids: tokens, [N].
        waves: cosines and signed sines of the tokens' positions for each rotary embedding (`rope_table`), and the
            factor of queries (`growth_table`); they broadcast against [N, H + K, D].
        attend: stores a layer's new keys and values and computes attention.
        adapters: LoRA adapters, with the rows of the first dimension of N that each computes.

    Returns:
        Normalized hidden states, [N, E].
    """
    config = weights.config
    x = F.embedding(ids, weights.embedding)
    if config.embedding_scale != 1.0:
        x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)  # rounded as in transformers
    for index, layer in enumerate(weights.layers):
        held = layer.held
        own = [(layers[index], rows) for layers, rows in adapters]
        normed = _normed(x, held.get("input_layernorm.weight"), config)
        mixed = attend(index, *_queries_and_keys(normed, layer, config, waves, own))
        added = _linear(mixed, layer, "self_attention.linear_proj", own)
        x = x + _normed(added, held.get("self_attn_bda.weight"), config)
        normed = _normed(x, held.get("pre_mlp_layernorm.weight"), config)
        if isinstance(layer.mlp, Experts):
            added = experts_output(normed, held, layer.mlp)
        else:
            gate, up = _linear(normed, layer, "mlp.linear_fc1", own).chunk(2, -1)
            gate = F.silu(gate) if layer.mlp.activation == "silu" else F.gelu(gate, approximate="tanh")
            added = _linear(gate * up, layer, "mlp.linear_fc2", own)
        x = x + _normed(added, held.get("mlp_bda.weight"), config)
    return _normed(x, weights.norm, config)


def _queries_and_keys(
    x: Tensor, layer: Layer, config: ModelShape, waves: Waves, adapters: Sequence[LayerRows]
) -> tuple[Tensor, Tensor]:
    """Return rotated queries [N, H, D], and rotated keys next to values [N, 2K, D]."""
    attention = layer.attention
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    qkv = _linear(x, layer, "self_attention.linear_qkv", adapters)
    qkv = qkv.view(*x.shape[:-1], heads + 2 * kv_heads, size)
    normed = rotated = qkv[..., : heads + kv_heads, :]
    if layer.qk_scale is not None:
        normed = (F.rms_norm(rotated, (size,), None, config.rms_norm_eps) * layer.qk_scale).to(x.dtype)
    if attention.joint_norms:
        norms = [layer.held[f"self_attention.{kind}_layernorm.weight"] for kind in ("q", "k")]
        parts = rotated.split((heads, kv_heads), dim=-2)
        both = (_normed(part.flatten(-2), own, config) for part, own in zip(parts, norms, strict=True))
        normed = torch.cat([part.unflatten(-1, (-1, size)) for part in both], dim=-2)
    growth = None
    if attention.rope is not None:
        cos, sin, growth = waves[attention.rope]
        torch.addcmul(normed * cos, swapped(normed, attention.rope), sin, out=rotated)
    elif normed is not rotated:
        rotated.copy_(normed)
    queries = qkv[..., :heads, :]
    return queries if growth is None else queries * growth, qkv[..., heads:, :]


def _normed(x: Tensor, weight: Tensor | None, config: ModelShape) -> Tensor:
    """Apply an RMSNorm. None: there is no norm."""
    if weight is None:
        return x
    if config.has_centred_norms:  # 1 plus the weight would be rounded in bfloat16
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1.0, config.rms_norm_eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _linear(x: Tensor, layer: Layer, name: str, adapters: Sequence[LayerRows]) -> Tensor:
    out = F.linear(x, layer.held[f"{name}.weight"], layer.held.get(f"{name}.bias"))
    for pairs, rows in adapters:
        if (pair := pairs.get(name)) is not None:
            pair.add(out, x, rows)
    return out


def released(weights: Weights) -> Weights:
    """Placeholder for released weights of the same model; it holds no memory."""
    nothing = torch.empty(0, dtype=weights.embedding.dtype)
    return Weights(
        config=weights.config,
        embedding=nothing,
        head=nothing,
        norm=nothing,
        layers=[],
        fused={},
        named={},
        dtypes=weights.dtypes,
    )


def zeros(weights: Weights) -> Weights:
    """Allocate weights of the same model, all zero; a weight update fills them later."""
    fresh = allocate(weights.config, weights.embedding.dtype)
    fresh.dtypes = dict(weights.dtypes)
    if (head := weights.config.name_of("lm_head.weight")) in fresh.dtypes:
        fresh.named.setdefault(head, fresh.embedding)
    for tensor in fresh.named.values():
        tensor.zero_()
    fresh.settle()
    return fresh
