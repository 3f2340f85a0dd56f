"""Core attention on torch's kernels, with the interface of Megatron's layers, and MLA (multi-latent attention)."""

import inspect
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.data.context import Context
from actors.trainer.megatron.columns import on_device
from actors.trainer.megatron.imports import (
    MLASelfAttention,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    set_tensor_model_parallel_attributes,
)
from actors.trainer.megatron.layers.blockwise import Plan, Row, blockwise
from actors.trainer.megatron.layers.rows import PackedRow, PaddedRows, QueryBlock, Units, own_context
from runtime.models.rope import QueryGrowth

SHORT: Final = 16  # positions up to which torch's CPU kernel, made for long sequences, is slower than the plain formula


class _StackRanks(torch.autograd.Function):
    """All-gather along a new first dimension. The backward pass sums the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient.is_cuda:
            own = torch.empty_like(gradient[0])
            dist.reduce_scatter(own, list(gradient.contiguous()), group=ctx.group)
            return own, None
        whole = gradient.contiguous()  # gloo has no reduce-scatter
        dist.all_reduce(whole, group=ctx.group)
        return whole[dist.get_rank(ctx.group)], None


class CoreAttention(nn.Module):
    """Causal attention of padded [s, b, heads, d] or packed [t, heads, d] queries.

    Keys and values may have fewer heads, and values another size than queries and keys. Padded batches need no padding
    mask: padding is on the right and carries no loss. On the CPU, packed batches, windows and parts of sequences are
    computed in blocks. On a GPU, packed batches use torch's variable-length kernel in bfloat16 or float16; in float32,
    with sinks, and for windows of padded batches, they have a dense mask with cost t * t, meant for tests. With
    context parallelism each rank has its part of the queries, and gathers all keys and values.

    The only parameter is `sinks`, [heads of this rank]: a score that takes a share of each query's softmax.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        window: int | None = None,
        has_sinks: bool = False,
        scale: float | None = None,
        growth: QueryGrowth | None = None,
        source: int | None = None,
    ) -> None:
        super().__init__()
        self._source = source  # number of the layer whose indexer chose the keys that are seen; None: all are
        self._growth = growth
        self._scale = softmax_scale if scale is None else scale
        self.sinks: nn.Parameter | None = None
        if has_sinks:
            heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            device = torch.cuda.current_device()
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)
        self._window = window  # keys that a query sees, its own among them

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return [s, b, heads * d], or [t, heads * d] when packed."""
        if self._source is not None:
            if (chosen := packed_seq_params.choices[self._source]) is not None:
                return self._sparse(query, key, value, chosen)
            packed_seq_params = None if isinstance(packed_seq_params, PaddedRows) else packed_seq_params
        if packed_seq_params is None:
            if self._growth is not None:
                query = query * _growth_of_padded(len(query), own_context(), self._growth, query.device).to(query.dtype)
            return self._padded(query, key, value).flatten(2)
        row: PackedRow = packed_seq_params
        if self._growth is not None:
            query = query * _growth_at(row.cu_seqlens_q.column, self._growth)[:, None, None].to(query.dtype)
        if row.order is not None:
            key, value = _gathered(key, value, row.order)
        if _has_kernel(query) and self.sinks is None:
            if row.order is not None:
                return self._halves(query, key, value, row).flatten(1)
            return self._varlen(query, key, value, row.stretches[0]).flatten(1)
        if query.is_cuda:
            return self._masked(query[:, None], key[:, None], value[:, None], row.mask(self._window))[:, 0].flatten(1)
        if self._window is None and self.sinks is None and row.units is not None:
            scale = query.size(-1) ** -0.5 if self._scale is None else self._scale
            attended: Any = _ByUnit.apply(query, key, value, row.units, scale)
            return attended.flatten(1)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, t, d]
        attended = blockwise(query, key, value, row.plan(self._window), self._scale, self.sinks)
        return attended[0].transpose(0, 1).flatten(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = own_context()
        whole = query.size(0) * context.size
        window = None if self._window is None or self._window >= whole else self._window
        if context.size > 1:
            key, value = _gathered(key, value, _order_of_padded(whole, context.size, key.device))
        is_plain = window is None and self.sinks is None
        if query.is_cuda and not is_plain:
            return self._masked(query, key, value, _padded_row(whole, context).mask(window).to(query.device))
        if query.is_cuda and context.size > 1:
            return self._padded_part(query, key, value, context)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        if context.size > 1 or not is_plain:
            attended = blockwise(query, key, value, _padded_plan(whole, context, window), self._scale, self.sinks)
        elif query.size(2) <= SHORT and not query.is_cuda:
            attended = _short(query, key, value, self._scale)
        else:
            grouped = key.size(1) != query.size(1)
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=grouped
            )
        return attended.permute(2, 0, 1, 3)

    def _sparse(self, query: Tensor, key: Tensor, value: Tensor, plans: Sequence[Plan]) -> Tensor:
        """Attend to chosen keys. A plan has one range of keys for each query."""
        is_packed = query.dim() == 3
        query, key, value = (each[:, None] if is_packed else each for each in (query, key, value))  # [s, b, heads, d]
        if query.is_cuda:
            mask = torch.zeros(len(plans), 1, len(query), len(query), dtype=torch.bool, device=query.device)
            for index, plan in enumerate(plans):
                for pair in plan:
                    assert pair.mask is not None
                    mask[index, 0, pair.queries, pair.keys] = pair.mask
            attended = self._masked(query, key, value, mask)
        else:
            queries, keys, values = (each.permute(1, 2, 0, 3).split(1) for each in (query, key, value))
            parts = [  # [1, heads, s, d]
                blockwise(*own, self._scale) for own in zip(queries, keys, values, plans, strict=True)
            ]
            attended = torch.cat(parts).permute(2, 0, 1, 3)
        return attended[:, 0].flatten(1) if is_packed else attended.flatten(2)

    def _padded_part(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Attend with each of the two chunks to all positions before its end."""
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler, over half a second

        chunk = query.size(0) // 2
        parts: list[Tensor] = []
        for index, which in enumerate((context.rank, context.multiple - 1 - context.rank)):
            part = query[index * chunk : (index + 1) * chunk].permute(1, 2, 0, 3)  # [b, heads, chunk, d]
            end = (which + 1) * chunk
            keys, values = (tensor[:end].permute(1, 2, 0, 3) for tensor in (key, value))
            attended = F.scaled_dot_product_attention(
                part, keys, values, causal_lower_right(chunk, end), scale=self._scale,
                enable_gqa=keys.size(1) != part.size(1),
            )  # fmt: skip
            parts.append(attended.permute(2, 0, 1, 3))
        return torch.cat(parts)

    def _halves(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        """Attend with a context-parallel rank's two chunks of each sequence, one after the other."""
        out = query.new_empty(*query.shape[:-1], value.size(-1))
        for half in row.stretches:
            attended = self._varlen(query[half.rows], key[half.seen], value[half.seen], half)
            out = out.index_copy(0, half.rows, attended)
        return out

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, stretch: QueryBlock) -> Tensor:
        """Call torch's variable-length kernel: values are padded to the size of keys.

        The last query of a sequence sees its last key.
        """
        size = value.size(-1)
        if size < key.size(-1):
            value = F.pad(value, (0, key.size(-1) - size))
        before = -1 if self._window is None else self._window - 1  # keys before a query's own; -1: all
        context = varlen_attn(
            query, key, value, stretch.bounds, stretch.key_bounds, stretch.longest, stretch.longest_keys,
            scale=self._scale, window_size=(before, 0), enable_gqa=query.size(1) != key.size(1),
        )  # fmt: skip
        assert isinstance(context, Tensor)
        return context[..., :size]

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        grouped = key.size(2) != query.size(2)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        if self.sinks is None:
            attended = F.scaled_dot_product_attention(query, key, value, mask, scale=self._scale, enable_gqa=grouped)
        else:
            attended = _with_sinks(query, key, value, mask, self._scale, self.sinks)
        return attended.permute(2, 0, 1, 3)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Describe the tensors of a checkpoint: tensor-parallel ranks have the sinks of their heads."""
        del metadata
        return by_head(self, "sinks", prefix, sharded_offsets)


def by_head(module: nn.Module, name: str, prefix: str, sharded_offsets: Any) -> Any:
    """Describe a module's parameter for a checkpoint, of which tensor-parallel ranks have the part of their heads."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        {name: 0},
        sharded_offsets,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, sinks: Tensor) -> Tensor:
    """Compute attention of [b, heads, s, d] with a mask directly; the sinks are scores of a key without a value."""
    sharing = query.size(1) // key.size(1)
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.size(-1) ** -0.5 if scale is None else scale)
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores.masked_fill(~mask, -torch.inf), column], -1).softmax(-1)
    return weights[..., :-1].to(value.dtype) @ value


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, enable_gqa: bool, **options: Any) -> Any:
    """Call torch's kernel; torch 2.11 has none for heads that queries share."""
    from torch.nn.attention.varlen import varlen_attn as kernel  # loads the compiler, which the CPU does without

    if _shares_heads():
        options["enable_gqa"] = enable_gqa
    elif enable_gqa:
        sharing = query.size(1) // key.size(1)
        key, value = (tensor.repeat_interleave(sharing, dim=1) for tensor in (key, value))
    return kernel(query, key, value, *bounds, **options)


@cache
def _shares_heads() -> bool:
    from torch.nn.attention.varlen import varlen_attn as kernel

    return "enable_gqa" in inspect.signature(kernel).parameters


def _has_kernel(query: Tensor) -> bool:
    """Whether torch has a variable-length kernel for these queries."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


class _ByUnit(torch.autograd.Function):
    """Attention [t, heads, d] within each short unit of samples that share a prompt.

    Autograd would keep scores and weights in float32 too, and fill hidden scores a second time.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, units: Units, scale: float
    ) -> Tensor:
        kv_heads, (batch, length) = key.size(1), units.size
        queries, keys, values = (_unit_rows(each, units, kv_heads) for each in (query, key, value))
        queries.mul_(scale)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores.view(batch, kv_heads, -1, length, length).masked_fill_(units.hidden, -torch.inf)
        weights = scores.softmax(-1)  # the kernel computes in float32
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.units, ctx.scale = units, scale
        return _packed(torch.bmm(weights, values), units, query.size(1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        queries, keys, values, weights = ctx.saved_tensors
        units: Units = ctx.units
        heads, kv_heads = gradient.size(1), keys.size(0) // units.size[0]
        padded = gradient.new_zeros(len(units.places), *gradient.shape[1:]).index_copy_(0, units.back, gradient)
        rows = _by_key_head(padded, units, kv_heads)
        of_values = torch.bmm(weights.transpose(1, 2), rows)
        of_weights = torch.bmm(rows, values.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        of_queries = torch.bmm(of_scores, keys).mul_(ctx.scale)
        of_keys = torch.bmm(of_scores.transpose(1, 2), queries)
        found = (_packed(of_queries, units, heads), *(_packed(each, units, kv_heads) for each in (of_keys, of_values)))
        return *found, None, None


def _unit_rows(vectors: Tensor, units: Units, kv_heads: int) -> Tensor:
    """Copy [t, heads, d] to units [b * kv heads, heads of a key-value head * s, d]."""
    return _by_key_head(vectors.index_select(0, units.places), units, kv_heads)


def _by_key_head(rows: Tensor, units: Units, kv_heads: int) -> Tensor:
    (batch, length), size = units.size, rows.size(-1)
    apart = rows.view(batch, length, kv_heads, -1, size).permute(0, 2, 3, 1, 4)
    return apart.reshape(batch * kv_heads, -1, size)


def _packed(rows: Tensor, units: Units, heads: int) -> Tensor:
    """Undo `_unit_rows`, without the padding."""
    (batch, length), size = units.size, rows.size(-1)
    return rows.view(batch, heads, length, size).transpose(1, 2).flatten(0, 1).index_select(0, units.back)


def _short(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Compute causal attention of [b, heads, s, d] directly. The queries that share a key head form one matrix."""
    batch, heads, length, size = query.shape
    sharing = heads // key.size(1)
    joined = query.reshape(batch, -1, sharing * length, size) * (size**-0.5 if scale is None else scale)
    later = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(sharing, 1)
    scores = (joined @ key.transpose(2, 3)).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).reshape(batch, heads, length, value.size(-1))


def _growth_at(positions: Tensor, growth: QueryGrowth) -> Tensor:
    """Return the factor of the queries at positions, float32."""
    return 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.length))


@lru_cache(maxsize=16)
def _growth_of_padded(length: int, context: Context, growth: QueryGrowth, device: torch.device) -> Tensor:
    """Return the factors of a rank's queries in padded rows, [s, 1, 1, 1]."""
    (positions,) = on_device([context.kept(np.array([length * context.size]))], device)
    return _growth_at(positions, growth)[:, None, None, None]


@lru_cache(maxsize=16)
def _padded_row(length: int, context: Context) -> Row:
    return Row.of(np.array([length]), context, None)


@lru_cache(maxsize=16)
def _padded_plan(length: int, context: Context, window: int | None) -> Plan:
    return _padded_row(length, context).plan(window)


@lru_cache(maxsize=64)
def _order_of_padded(length: int, size: int, device: torch.device) -> Tensor:
    """`PackedRow.order` for rows of one length."""
    return on_device([Context(0, size).order(np.array([length]))], device)[0]


def _gathered(key: Tensor, value: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all positions, in order. Their sizes may differ, their numbers of heads may not."""
    group, size = parallel_state.get_context_parallel_group(), key.size(-1)
    both = _StackRanks.apply(torch.cat([key, value], dim=-1), group)
    ordered = both.flatten(0, 1)[order]  # pyright: ignore[reportOptionalMemberAccess]
    return ordered[..., :size], ordered[..., size:]


class _Down(nn.Module):
    """Down projection that is replicated on tensor-parallel ranks.

    Under sequence parallelism its input is this rank's positions. Megatron's local layers shard the projection and
    gather its output. The shared part of all heads' keys then gets the gradient of one rank's heads alone.
    """

    def __init__(self, config: Any, columns: int, rows: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Project [s, b, columns] to [s, b, rows]; return it and no bias."""
        return F.linear(hidden, self.weight), None


class MlaAttention(MLASelfAttention):
    """Megatron's MLA with replicated down projections."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        hidden = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _Down(config, hidden, config.q_lora_rank)
        self.linear_kv_down_proj = _Down(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
