"""Attention of a layer, and what it is made of: linear layers with adapters, norms, rotary embeddings.

Shapes: N leading dimensions (tokens, or batch x time), H heads, K KV heads, D head size, E hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.models.blocks import Attention, DeltaNet, Experts, Indexer, Mla, Mlp, ModelShape
from runtime.models.rope import Rope

UP: Final = "self_attention.linear_kv_up_proj"
INDEXER: Final = "self_attention.indexer"
LATENT_EPS: Final = (
    1e-6  # of the norms of latents and of a chooser's keys; transformers does not take it from config.json
)

# by rotary embedding and its size: cosines and signed sines of positions, and the factor of queries there
Waves = Mapping[tuple[Rope, int], tuple[Tensor, Tensor, Tensor | None]]


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

    attention: Attention | Mla | DeltaNet
    mlp: Mlp | Experts
    held: dict[str, Tensor]
    qk_scale: Tensor | None = None  # [H + K, D]: the norms of queries and keys, per head


class Chooser(NamedTuple):
    """Scores of keys, by which each query sees those with the largest ones."""

    topk: int  # keys that a query sees
    # queries [N, heads, size] and weights [N, heads] of the scores; None: the last layer with scores has chosen
    scored: tuple[Tensor, Tensor] | None


class Past(Protocol):
    """What the tokens of a pass see of earlier ones. It stores theirs for later passes (caches.py)."""

    @property
    def waves(self) -> Waves:
        """Cosines and signed sines of the tokens' positions. They broadcast against [N, H, D]."""
        ...

    @property
    def lengths(self) -> Tensor | None:
        """Number of tokens of each row, [rows]; the others are padding behind them. None: no row has padding."""
        ...

    def attend(
        self, index: int, queries: Tensor, stored: Tensor, sinks: Tensor | None = None, chooser: Chooser | None = None
    ) -> Tensor:
        """Store a layer's new keys and values, and compute attention.

        Args:
            index: of the layer.
            queries: [N, H, D].
            stored: keys and values [N, 2K, D], or with latents [N, 1, D], which begin with the values. The
                keys of a chooser follow.
            sinks: [H], or None.
            chooser: of the keys that are seen. None: all.

        Returns:
            [N, H * size of values].
        """
        ...

    def recall(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the states of a linear layer's rows (delta_net.py), and the last inputs of its convolution."""
        ...

    def keep(self, index: int, state: Tensor, inputs: Tensor) -> None:
        """Store what `recall` returns to the next pass."""
        ...


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


def rotary(block: Attention | Mla | DeltaNet) -> tuple[Rope, int] | None:
    """Return the rotary embedding of a layer, and the size that it rotates. None: the layer knows no positions."""
    if isinstance(block, Mla):  # its files have the coordinates of a plane next to each other
        return msgspec.structs.replace(block.rope, is_interleaved=True), block.rotated_dim
    if isinstance(block, DeltaNet) or block.rope is None:
        return None
    return block.rope, block.head_dim


def chooser_rotary(attention: Mla, block: Indexer) -> tuple[Rope, int]:
    """Return the rotary embedding of the scores that choose keys, and the size that it rotates."""
    return msgspec.structs.replace(attention.rope, is_interleaved=block.is_interleaved), attention.rotated_dim


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


def normed(x: Tensor, weight: Tensor | None, config: ModelShape) -> Tensor:
    """Apply an RMSNorm. None: there is no norm."""
    if weight is None:
        return x
    if config.has_centred_norms:  # 1 plus the weight would be rounded in bfloat16
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1.0, config.rms_norm_eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def linear(x: Tensor, layer: Layer, name: str, adapters: Sequence[LayerRows]) -> Tensor:
    """Apply a linear layer by its name in the trainer, with its bias and the adapters of the rows."""
    out = F.linear(x, layer.held[f"{name}.weight"], layer.held.get(f"{name}.bias"))
    for pairs, rows in adapters:
        if (pair := pairs.get(name)) is not None:
            pair.add(out, x, rows)
    return out


def attended(
    index: int, x: Tensor, layer: Layer, config: ModelShape, past: Past, adapters: Sequence[LayerRows]
) -> Tensor:
    """Compute attention of a layer up to its output projection.

    Args:
        index: of the layer.
        x: normalized hidden states, [N, E].
        layer: with heads that are projected directly, or with latents.
        config: of the model.
        past: of the pass.
        adapters: of the layer.

    Returns:
        Mixed values of all heads, [N, H * size of values].
    """
    if isinstance(layer.attention, Mla):
        return _of_latents(index, x, layer, layer.attention, past, adapters)
    assert isinstance(layer.attention, Attention)
    qkv, gates = _projected(x, layer, layer.attention, adapters)
    queries, stored = _rotated(qkv, layer, layer.attention, config, past.waves)
    mixed = past.attend(index, queries, stored, layer.held.get("self_attention.core_attention.sinks"))
    return mixed if gates is None else mixed * gates.sigmoid()


def _projected(
    x: Tensor, layer: Layer, attention: Attention, adapters: Sequence[LayerRows]
) -> tuple[Tensor, Tensor | None]:
    """Return queries, keys and values [N, H + 2K, D], and the gates of outputs [N, H * D] if there are any."""
    heads = attention.heads
    qkv = linear(x, layer, "self_attention.linear_qkv", adapters).unflatten(-1, (-1, attention.head_dim))
    if attention.has_one_projection:
        qkv = torch.cat((qkv, qkv[..., heads:, :]), -2)
    if not attention.has_gate:
        return qkv, None
    queries, gates = qkv[..., : 2 * heads, :].unflatten(-2, (heads, 2)).unbind(-2)
    return torch.cat((queries, qkv[..., 2 * heads :, :]), -2), gates.flatten(-2)


def _rotated(
    qkv: Tensor, layer: Layer, attention: Attention, config: ModelShape, waves: Waves
) -> tuple[Tensor, Tensor]:
    """Return normalized and rotated queries [N, H, D], and such keys next to values [N, 2K, D]."""
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.head_dim
    normal = rotated = qkv[..., : heads + kv_heads, :]
    if layer.qk_scale is not None:
        normal = (F.rms_norm(rotated, (size,), None, config.rms_norm_eps) * layer.qk_scale).to(qkv.dtype)
    if attention.joint_norms:
        norms = [layer.held[f"self_attention.{kind}_layernorm.weight"] for kind in ("q", "k")]
        parts = rotated.split((heads, kv_heads), dim=-2)
        both = (normed(part.flatten(-2), own, config) for part, own in zip(parts, norms, strict=True))
        normal = torch.cat([part.unflatten(-1, (-1, size)) for part in both], dim=-2)
    if attention.has_value_norms:
        values = qkv[..., heads + kv_heads :, :]
        values.copy_(F.rms_norm(values, (size,), None, config.rms_norm_eps))
    growth = None
    if (rope := rotary(attention)) is not None:
        cos, sin, growth = waves[rope]
        torch.addcmul(normal * cos, swapped(normal, rope[0]), sin, out=rotated)
    elif normal is not rotated:
        rotated.copy_(normal)
    queries = qkv[..., :heads, :]
    return queries if growth is None else queries * growth, qkv[..., heads:, :]


def _of_latents(
    index: int, x: Tensor, layer: Layer, attention: Mla, past: Past, adapters: Sequence[LayerRows]
) -> Tensor:
    """Compute attention to latents, which are kept in the place of keys and values, as SGLang does.

    Queries pass the matrix that would expand keys, and outputs the one that would expand values.
    """
    heads, rotated = attention.heads, attention.rotated_dim
    if attention.query_rank is None:
        narrow, queries = x, linear(x, layer, "self_attention.linear_q_proj", adapters)
    else:
        narrow = _latent(linear(x, layer, "self_attention.linear_q_down_proj", adapters), layer, "q")
        queries = linear(narrow, layer, "self_attention.linear_q_up_proj", adapters)
    down = linear(x, layer, "self_attention.linear_kv_down_proj", adapters).unsqueeze(-2)
    latent, shared = down.split((attention.key_value_rank, rotated), -1)
    plain, own = queries.unflatten(-1, (heads, -1)).split((attention.plain_dim, rotated), -1)
    rope = rotary(attention)
    assert rope is not None
    cos, sin, _ = past.waves[rope]
    own, shared = (each * cos + swapped(each, rope[0]) * sin for each in (own, shared))
    of_keys, of_values = _expanding(layer, attention, adapters)
    chooser, further = _chooser(x, narrow, layer, attention, past.waves)
    stored = torch.cat((_latent(latent, layer, "kv"), shared, *further), -1)
    mixed = past.attend(index, torch.cat((_passed(plain, of_keys), own), -1), stored, chooser=chooser)
    turned = [(up.transpose(1, 2), rows) for up, rows in of_values]
    return _passed(mixed.unflatten(-1, (heads, -1)), turned).flatten(-2)


def _chooser(
    x: Tensor, narrow: Tensor, layer: Layer, attention: Mla, waves: Waves
) -> tuple[Chooser | None, Sequence[Tensor]]:
    """Return what chooses the keys of queries, given their latents, and the keys [N, 1, size] that it is given."""
    block, held = attention.indexer, layer.held
    if block is None or block.is_shared:
        return None if block is None else Chooser(block.topk, None), ()
    queries = F.linear(narrow, held[f"{INDEXER}.wq_b.weight"]).unflatten(-1, (block.heads, -1))
    weight, bias = (held[f"{INDEXER}.k_norm.{kind}"] for kind in ("weight", "bias"))
    keys = F.layer_norm(F.linear(x, held[f"{INDEXER}.wk.weight"]), weight.shape, weight, bias, LATENT_EPS)
    rope = chooser_rotary(attention, block)
    cos, sin, _ = waves[rope]
    sizes = (attention.rotated_dim, block.head_dim - attention.rotated_dim)
    split = (each.split(sizes, -1) for each in (queries, keys.unsqueeze(-2)))
    turned = [torch.cat((first * cos + swapped(first, rope[0]) * sin, rest), -1) for first, rest in split]
    weights = F.linear(x, held[f"{INDEXER}.weights_proj.weight"]).float() * (block.heads * block.head_dim) ** -0.5
    return Chooser(block.topk, (turned[0], weights)), turned[1:]


def _latent(x: Tensor, layer: Layer, kind: str) -> Tensor:
    weight = layer.held[f"self_attention.{kind}_layernorm.weight"]
    return F.rms_norm(x, weight.shape, weight, LATENT_EPS)


def _expanding(
    layer: Layer, attention: Mla, adapters: Sequence[LayerRows]
) -> tuple[list[tuple[Tensor, Tensor | None]], ...]:
    """Return the matrices [H, size, R] that expand latents of size R to keys, and those to values, with their rows.

    The first is of all rows. Those of an adapter follow, and replace it in their rows.
    """
    weight = layer.held[f"{UP}.weight"]
    own = [(pair, rows) for pairs, rows in adapters if (pair := pairs.get(UP)) is not None]
    merged = [(torch.addmm(weight, pair.b.t(), pair.a, alpha=pair.scale), rows) for pair, rows in own]
    sizes = (attention.plain_dim, attention.value_dim)
    split = [
        (each.unflatten(0, (attention.heads, -1)).split(sizes, 1), rows) for each, rows in ((weight, None), *merged)
    ]
    return [(parts[0], rows) for parts, rows in split], [(parts[1], rows) for parts, rows in split]


def _passed(x: Tensor, matrices: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Multiply heads [rows, ..., H, in] by matrices [H, in, out]; each replaces the product of its rows."""
    out = torch.einsum("...hi,hio->...ho", x, matrices[0][0])
    for matrix, rows in matrices[1:]:
        own = slice(None) if rows is None else rows
        out[own] = torch.einsum("...hi,hio->...ho", x[own], matrix)
    return out
