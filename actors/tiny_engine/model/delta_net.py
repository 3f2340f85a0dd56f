"""The gated delta net: linear attention with a state for each request, behind a short convolution.

A pass computes the tokens of a row in chunks: a state passes from chunk to chunk, and a decoded token is a chunk of its
own. So prefills and decodes are one computation. The trainer has the form with gradients over packed rows
(`actors/trainer/megatron/layers/delta_rule.py`); both are compared with transformers.

Shapes: B rows, Q tokens of each, C tokens of a chunk, G key heads with r value heads each, K key and V value sizes.

Source:
    Gated Delta Networks, arXiv 2412.06464, section 3.3.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.tiny_engine.model.layers import Layer, LayerRows, Past, linear
from runtime.models.blocks import DeltaNet, ModelShape

CHUNK: Final = 64  # tokens
TINY: Final = 1e-6  # added to the squared length of a query or key, as in transformers


def mixed(index: int, x: Tensor, layer: Layer, config: ModelShape, past: Past, adapters: Sequence[LayerRows]) -> Tensor:
    """Compute linear attention of a layer up to its output projection.

    Args:
        index: of the layer.
        x: normalized hidden states: [B, Q, E], or [B, E] of one token a row.
        layer: with a gated delta net.
        config: of the model.
        past: of the pass; the states and inputs that it has are replaced by those behind the tokens.
        adapters: of the layer.

    Returns:
        Gated values of all heads, [B, Q, G * r * V], or [B, G * r * V].
    """
    block = layer.attention
    assert isinstance(block, DeltaNet)
    rows, gate, rate, step = _projected(x if x.dim() == 3 else x.unsqueeze(1), layer, block, adapters)
    state, inputs = past.recall(index)
    rows, inputs = _convolved(rows, inputs, layer.held["self_attention.conv"], past.lengths)
    size, heads = block.key_heads * block.key_dim, (block.key_heads, block.shared)
    query, key, value = F.silu(rows).float().split((size, size, rows.shape[-1] - 2 * size), -1)
    speed = -layer.held["self_attention.A_log"].float().exp()
    decay = speed * F.softplus(step.float() + layer.held["self_attention.dt_bias"].float())
    rate = rate.sigmoid().float()
    if past.lengths is not None:  # padding leaves the state as it is
        is_token = (torch.arange(rows.shape[1]) < past.lengths[:, None]).unsqueeze(-1)
        decay, rate = decay * is_token, rate * is_token
    query, key = (each.unflatten(-1, (block.key_heads, -1)) for each in (query, key))
    value = value.unflatten(-1, (*heads, -1))
    read, state = delta_rule(query, key, value, decay.unflatten(-1, heads), rate.unflatten(-1, heads), state)
    past.keep(index, state, inputs)
    weight = layer.held["self_attention.norm"]
    normal = F.rms_norm(read.to(x.dtype).float(), weight.shape, None, config.rms_norm_eps).to(x.dtype) * weight
    gated = normal * F.silu(gate.unflatten(-1, value.shape[2:]).float())
    return gated.to(x.dtype).flatten(2).view(*x.shape[:-1], -1)


def _projected(
    x: Tensor, layer: Layer, block: DeltaNet, adapters: Sequence[LayerRows]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of the convolution [B, Q, channels], gates [B, Q, G * r * V], and rates and steps [B, Q, G * r]."""
    names = ("self_attention.linear_qkv", "self_attention.linear_gates")
    first, second = (linear(x, layer, name, adapters) for name in names)
    key, value, shared = block.key_dim, block.shared * block.value_dim, block.shared
    if not block.is_fused:
        heads = block.key_heads * shared
        gate, rate, step = second.split((block.key_heads * value, heads, heads), -1)
        return first, gate, rate, step
    parts = first.unflatten(-1, (block.key_heads, -1)).split((key, key, value, value), -1)
    *rows, gate = (part.flatten(2) for part in parts)
    rate, step = (part.flatten(2) for part in second.unflatten(-1, (block.key_heads, -1)).split((shared, shared), -1))
    return torch.cat(rows, -1), gate, rate, step


def _convolved(rows: Tensor, inputs: Tensor, weight: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve [B, Q, channels] causally behind the inputs before; also return the last inputs of each row."""
    joined = torch.cat((inputs, rows), 1)
    kept = inputs.shape[1]
    if lengths is None:
        last = joined[:, joined.shape[1] - kept :]
    else:
        places = lengths[:, None] + torch.arange(kept)
        last = joined.gather(1, places.unsqueeze(-1).expand(-1, -1, joined.shape[-1]))
    return F.conv1d(joined.transpose(1, 2), weight, groups=len(weight)).transpose(1, 2), last


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute linear attention by the gated delta rule, in float32.

    A token decays the state, replaces a share of what the state says of its key by its value, and reads the state by
    its query. Queries and keys are scaled to length 1, queries by `K ** -0.5` besides.

    Args:
        query: [B, Q, G, K].
        key: [B, Q, G, K].
        value: [B, Q, G, r, V].
        decay: [B, Q, G, r], logarithm of the state's decay, at most 0.
        rate: [B, Q, G, r], the share, from 0 to 1.
        state: [B, G, r, K, V], before the first token.

    Returns:
        What the tokens read, [B, Q, G, r, V], and the state behind the last one.
    """
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    found: list[Tensor] = []
    for begin in range(0, query.shape[1], CHUNK):
        own = (each[:, begin : begin + CHUNK] for each in (query, key, value, decay, rate))
        read, state = _chunk(*own, state=state)
        found.append(read)
    return torch.cat(found, 1), state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, *, state: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = (each.transpose(1, 2).unsqueeze(2) for each in (query, key))  # [B, G, 1, C, K]
    value, decay, rate = (each.movedim(1, 3) for each in (value, decay, rate))  # [B, G, r, C, ...]
    sums = decay.double().cumsum(-1)  # large, and their differences small
    between = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril().float()
    grown, left = sums.exp().float()[..., None], (sums[..., -1:] - sums).exp().float()[..., None]
    rate = rate[..., None]
    corrected = rate * (value - grown * (key @ state))  # what each token would write alone
    if query.shape[3] > 1:
        system = rate * ((key @ key.transpose(3, 4)) * between)
        corrected = torch.linalg.solve_triangular(system, corrected, upper=False, unitriangular=True)
    read = (query * grown) @ state + ((query @ key.transpose(3, 4)) * between) @ corrected
    state = grown[..., -1:, :] * state + (key * left).transpose(3, 4) @ corrected
    return read.movedim(3, 1), state


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + TINY)
