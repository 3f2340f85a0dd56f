"""Attention on torch's kernels, in the form in which Megatron's layers call it."""

import inspect
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from actors.trainer.batches.context import Context, Ints
from actors.trainer.megatron.imports import PackedSeqParams, parallel_state

SHORT: Final = 16  # positions up to which torch's kernel for the CPU, made for long sequences, takes longer
SHARES_HEADS: Final = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11's kernel does not


class _Gather(torch.autograd.Function):
    """The parts of all ranks of a group behind each other on a new first dimension; gradients are summed back."""

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
    """Causal attention of padded [s, b, heads, d] or packed [t, heads, d] queries; keys, values may have fewer heads,
    and values another size than queries and keys.

    Padded batches need no padding mask: padding is on the right and its positions carry no loss. Packed batches use
    torch's variable-length kernel on a GPU in bfloat16, and else a dense mask (cost t * t: for tests). Of
    context-parallel ranks each has its part of the queries and gathers all keys and values.
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
    ) -> None:
        super().__init__()
        self._scale = softmax_scale

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
        context = _context()
        if packed_seq_params is None:
            if context.size > 1:
                return self._padded_part(query, key, value, context).flatten(2)
            return self._padded(query, key, value).flatten(2)
        lengths: Ints = packed_seq_params.lengths
        if context.size > 1:
            return self._packed_part(query, key, value, packed_seq_params, context).flatten(1)
        if _has_kernel(query):
            return self._varlen(query, key, value, lengths, lengths).flatten(1)
        return self._masked(query, key, value, packed_seq_params, context).flatten(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        if query.size(2) <= SHORT and not query.is_cuda:
            return _short(query, key, value, self._scale).permute(2, 0, 1, 3)
        grouped = key.size(1) != query.size(1)
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=grouped
        )
        return context.permute(2, 0, 1, 3)

    def _padded_part(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Each of the two chunks attends to all that is before its end."""
        whole = query.size(0) * context.size
        key, value = _gathered(key, value, np.array([whole]), context)
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

    def _packed_part(self, query: Tensor, key: Tensor, value: Tensor, packed: Any, context: Context) -> Tensor:
        lengths: Ints = packed.lengths
        key, value = _gathered(key, value, lengths, context)
        if not _has_kernel(query):
            return self._masked(query, key, value, packed, context)
        out = query.new_empty(*query.shape[:-1], value.size(-1))
        chunks, starts = lengths // context.multiple, np.cumsum(lengths) - lengths
        for index, which in enumerate((context.rank, context.multiple - 1 - context.rank)):
            rows = _ranges(starts // context.size + index * chunks, chunks).to(query.device)
            seen = _ranges(starts, (which + 1) * chunks).to(query.device)
            attended = self._varlen(query[rows], key[seen], value[seen], chunks, (which + 1) * chunks)
            out = out.index_copy(0, rows, attended)
        return out

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, lengths: Ints, key_lengths: Ints) -> Tensor:
        """By torch's kernel, which wants values of the size of keys; a sequence's last query sees its last key."""
        size = value.size(-1)
        if size < key.size(-1):
            value = F.pad(value, (0, key.size(-1) - size))
        bounds, key_bounds = (_bounds(each).to(query.device) for each in (lengths, key_lengths))
        sharing = query.size(1) // key.size(1)
        if sharing > 1 and not SHARES_HEADS:
            key, value = (tensor.repeat_interleave(sharing, dim=1) for tensor in (key, value))
        sharing_told: dict[str, Any] = {"enable_gqa": sharing > 1} if SHARES_HEADS else {}
        context = varlen_attn(
            query, key, value, bounds, key_bounds, int(lengths.max()), int(key_lengths.max()),
            scale=self._scale, window_size=(-1, 0), **sharing_told,
        )  # fmt: skip
        assert isinstance(context, Tensor)
        return context[..., :size]

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, packed: Any, context: Context) -> Tensor:
        """By a dense mask, which the first layer makes for all."""
        if packed.mask is None:
            packed.mask = _mask(packed.lengths, context).to(query.device)
        mask: Tensor = packed.mask
        grouped = key.size(1) != query.size(1)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, t, d]
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=self._scale, enable_gqa=grouped)
        return attended[0].transpose(0, 1)


def _has_kernel(query: Tensor) -> bool:
    """Whether torch has a kernel for sequences of several lengths."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _mask(lengths: Ints, context: Context) -> Tensor:
    """Which of all keys each query of this rank sees: those of its sequence up to its own."""
    segment, everywhere = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)), np.arange(int(lengths.sum()))
    positions, keys = torch.from_numpy(context.kept(lengths)), torch.from_numpy(everywhere)
    return (segment[positions][:, None] == segment[None, :]) & (positions[:, None] >= keys[None, :])


def _short(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of [b, heads, s, d] by its formula; the queries of a group of heads are one matrix."""
    batch, heads, length, size = query.shape
    sharing = heads // key.size(1)
    joined = query.reshape(batch, -1, sharing * length, size) * (size**-0.5 if scale is None else scale)
    later = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(sharing, 1)
    scores = (joined @ key.transpose(2, 3)).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).reshape(batch, heads, length, value.size(-1))


def _bounds(lengths: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _ranges(starts: Ints, lengths: Ints) -> Tensor:
    """Positions of stretches, behind each other."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + within)


def packing(bounds: NDArray[np.int32] | None, device: torch.device) -> Any:
    """Megatron's description of a packed row.

    Args:
        bounds: where each whole sequence begins, and the end; none: the batch is padded.
        device: of the row.
    """
    if bounds is None:
        return None
    on_device = torch.from_numpy(bounds).to(device)
    lengths = np.diff(bounds).astype(np.int64)
    longest = int(lengths.max())
    described = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=on_device, cu_seqlens_kv=on_device, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    described.lengths = lengths  # for our attention, which then need not ask the device
    described.mask = None
    return described


def _context() -> Context:
    """This rank among those that share each sequence."""
    return Context(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


def _gathered(key: Tensor, value: Tensor, lengths: Ints, context: Context) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions in order; heads may differ in size, not in number."""
    group, size = parallel_state.get_context_parallel_group(), key.size(-1)
    both = _Gather.apply(torch.cat([key, value], dim=-1), group)
    order = torch.from_numpy(context.order(lengths)).to(key.device)
    ordered = both.flatten(0, 1)[order]  # pyright: ignore[reportOptionalMemberAccess]
    return ordered[..., :size], ordered[..., size:]
