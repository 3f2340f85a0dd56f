"""Megatron's attention in layers that differ from others: in sizes of heads, rotary embeddings, norms of all heads."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.megatron.imports import (
    RotaryEmbedding,
    SelfAttention,
    parallel_state,
    set_tensor_model_parallel_attributes,
)
from actors.trainer.megatron.layers.attention import by_head
from runtime.models.blocks import Attention


class Rotary(RotaryEmbedding):
    """Megatron's rotary embedding with several sets of frequencies, [d / 2] each, for layers that differ in it."""

    sets: Sequence[Tensor]

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of all positions, [s, sets, 1, largest d]. A layer selects one set, and its coordinates."""
        device = torch.cuda.current_device()
        self.sets = [frequencies.to(device) for frequencies in self.sets]
        places = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device)[:, None]
        angles = [places * frequencies for frequencies in self.sets]
        largest = 2 * max(map(len, self.sets))
        both = [
            own.repeat_interleave(2, -1) if self.rotary_interleaved else torch.cat([own, own], dim=-1) for own in angles
        ]
        return torch.stack([F.pad(own, (0, largest - own.size(-1))) for own in both], dim=1)[:, :, None]


class HeadAttention(SelfAttention):
    """Megatron's attention in a layer that differs from others, or that computes values in another way.

    Its heads may have sizes of their own. Its rotary embedding is one of several, or it has none.
    """

    def __init__(
        self, config: Any, submodules: Any, *args: Any, block: Attention, rope: int | None, **options: Any
    ) -> None:
        own = copy(config)
        own.kv_channels, own.num_query_groups = block.head_dim, block.kv_heads
        if block.has_one_projection:
            rows = (block.heads + block.kv_heads) * block.head_dim
            submodules = replace(submodules, linear_qkv=partial(_with_rows, submodules.linear_qkv, rows))
        super().__init__(own, submodules, *args, **options)
        self._block = block
        self._rope = rope  # its place among the sets of `Rotary`, if there are several; None: no rotary embedding

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the layer adds to the residual, without a bias, and the bias."""
        angles = None
        if self._rope is not None:
            rotated = int(self._block.head_dim * (1.0 if self._block.rope is None else self._block.rope.share))
            angles = rotary_pos_emb[:, self._rope : self._rope + 1, ..., :rotated]
        return super().forward(hidden_states, rotary_pos_emb=angles, **options)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Return queries, keys and values [s, b, heads, d], normalized but not rotated."""
        if not self._block.has_one_projection:
            query, key, value, *rest = super().get_query_key_value_tensors(hidden_states, *args, **options)
        else:
            mixed, _ = self.linear_qkv(hidden_states)
            heads = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self._block.head_dim))
            query, value, rest = heads[..., :-1, :].flatten(2, 3), heads[..., -1, :], ()
            key = value
            if self.q_layernorm is not None:
                query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self._block.has_value_norms:
            value = F.rms_norm(value, value.shape[-1:], None, self.config.layernorm_epsilon)
        return query, key, value, *rest


def _with_rows(make: Any, rows: int, columns: int, _rows: int, **options: Any) -> Any:
    """Make a linear layer with a number of rows of its own."""
    return make(columns, rows, **options)


class _Summed(torch.autograd.Function):
    """Sum over the ranks of a group, forward and backward: each rank's result depends on what all ranks have."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = gradient.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class JointNorm(nn.Module):
    """RMSNorm of the queries or keys of all heads, of which a tensor-parallel rank has some and their weights."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__()
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._size, self._eps = heads * hidden_size, eps
        device = torch.cuda.current_device()
        size = self._size // self._group.size()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize [..., heads of this rank, d]."""
        values = heads.flatten(-2)
        if self._group.size() == 1:
            return F.rms_norm(values, self.weight.shape, self.weight, self._eps).view_as(heads)
        wide = values.float()
        squares: Any = _Summed.apply(wide.square().sum(-1, keepdim=True), self._group)
        normal = wide * (squares / self._size + self._eps).rsqrt()
        return (normal * self.weight).to(heads.dtype).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Describe the tensors of a checkpoint: tensor-parallel ranks have the weights of their heads."""
        del metadata
        return by_head(self, "weight", prefix, sharded_offsets)
