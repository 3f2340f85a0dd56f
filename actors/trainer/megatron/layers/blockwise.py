"""Causal attention on the CPU without a mask of all positions: packed rows, windows, sinks, shared prompts, chunks.

A plan lists pairs of a range of queries and a range of keys. Torch's CPU kernel computes each pair; the softmax over
several ranges follows from the logarithms of their sums. Memory grows with the number of positions.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.data.batch import SharedPrompts
from actors.trainer.data.context import Context, Ints
from actors.trainer.data.prompts import PROMPT

SHORT_ROW: Final = 128  # positions up to which a row is one pair with a mask: a call for each sample takes longer
QUERIES: Final = (
    128,
    512,
)  # least and most queries of a pair under a window; between them half as many as it (measured)
HIDDEN: Final = -1e30  # score of a key that a query does not see; -inf would give NaN where a query sees no key

_KERNEL: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Pair(NamedTuple):
    """A range of queries and a range of keys that they see, wholly, causally, or as a mask says."""

    queries: slice
    keys: slice
    is_first: bool  # of all pairs with these queries
    is_causal: bool = False
    mask: Tensor | None = None  # [queries, keys], 0 or HIDDEN, or whether a query sees a key


Plan = tuple[Pair, ...]


class Row(NamedTuple):
    """Positions of a packed row, and which of them a rank has."""

    sequences: Ints  # [t], number of each position's sequence or unit
    owners: Ints  # [t], number of its sample within a unit; PROMPT: of the prompt
    places: Ints  # [t], position in its sample
    kept: Ints  # [queries], positions that this rank has

    @classmethod
    def of(cls, lengths: Ints, context: Context, shared: SharedPrompts | None) -> "Row":
        """Return the positions of sequences, or of units that share prompts."""
        total, starts = int(lengths.sum()), np.cumsum(lengths) - lengths
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        if shared is not None:
            return cls(sequences, shared.owners, shared.places, context.kept(lengths))
        return cls(sequences, np.zeros(total, np.int64), np.arange(total) - starts[sequences], context.kept(lengths))

    def mask(self, window: int | None) -> Tensor:
        """Return which keys [queries, keys] each query sees: those of its sample up to its own, and of its prompt."""
        mask = self._seen(self.kept, np.arange(len(self.sequences)))
        if window is not None:
            places = torch.from_numpy(self.places)
            mask &= places[self.kept][:, None] - places < window
        return mask

    def seen(self, queries: slice, keys: slice) -> Tensor:
        """Return which keys of a range each query of another sees, [queries, keys]."""
        return self._seen(*(np.arange(each.start, each.stop) for each in (queries, keys)))

    def _seen(self, queries: Ints, keys: Ints) -> Tensor:
        mask = self.sequences[queries][:, None] == self.sequences[keys]
        mask &= queries[:, None] >= keys
        mask &= (self.owners[queries][:, None] == self.owners[keys]) | (self.owners[keys] == PROMPT)
        return torch.from_numpy(mask)

    def plan(self, window: int | None) -> Plan:
        """Return the pairs of ranges of attention over these positions.

        Args:
            window: Number of keys that a query sees, its own among them. None: all up to its own.
        """
        if len(self.sequences) <= SHORT_ROW:
            everything = slice(0, len(self.kept)), slice(0, len(self.sequences))
            hidden = torch.zeros(len(self.kept), len(self.sequences)).masked_fill_(~self.mask(window), HIDDEN)
            return (Pair(*everything, is_first=True, mask=hidden),)
        return tuple(self._pairs(window))

    def stretches(self) -> tuple[Ints, Ints]:
        """Return the first position of each stretch of one sample or prompt, and its prompt's stretch; -1: none."""
        changes = (np.diff(self.sequences) != 0) | (np.diff(self.owners) != 0)
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        of_unit = np.searchsorted(self.sequences[starts], self.sequences[starts])  # first stretch of each one's unit
        shares = (self.owners[starts[of_unit]] == PROMPT) & (of_unit < np.arange(len(starts)))
        return starts, np.where(shares, of_unit, -1)

    def _pairs(self, window: int | None) -> Iterator[Pair]:
        starts, prompts = self.stretches()
        of_queries = np.searchsorted(starts, self.kept, side="right") - 1
        breaks = np.flatnonzero((np.diff(self.kept) != 1) | (np.diff(of_queries) != 0)) + 1
        bounds = [0, *breaks.tolist(), len(self.kept)]
        for row, end in pairwise(bounds):
            number, first = int(of_queries[row]), int(self.kept[row])
            own, prompt = int(starts[number]), int(prompts[number])
            seen = [(int(starts[prompt]), int(starts[prompt + 1]))] if prompt >= 0 else []
            size = end - row if window is None else min(max(window // 2, QUERIES[0]), QUERIES[1])
            for at in range(0, end - row, size):
                queries = slice(row + at, min(row + at + size, end))
                yield from self._of_queries(queries, first + at, [*seen, (own, first + at)], window)

    def _of_queries(
        self, queries: slice, first: int, earlier: list[tuple[int, int]], window: int | None
    ) -> Iterator[Pair]:
        """Yield the pairs of a range of queries: with themselves, and with each earlier range of keys."""
        number, place = queries.stop - queries.start, int(self.places[first])
        own = slice(first, first + number)
        if window is None or number <= window:
            yield Pair(queries, own, is_first=True, is_causal=True)
        else:
            yield Pair(queries, own, is_first=True, mask=_band(number, number, 0, window))
        for start, end in earlier:
            if window is None:
                if start < end:
                    yield Pair(queries, slice(start, end), is_first=False)
                continue
            lowest = start + max(place - window + 1 - int(self.places[start]), 0)
            if lowest >= end:
                continue
            distance = place - int(self.places[lowest])  # of the first query from the first key
            partly = min(max(lowest + distance + number - window, lowest), end)  # keys that some queries do not see
            if lowest < partly:
                mask = _band(number, partly - lowest, distance, window)
                yield Pair(queries, slice(lowest, partly), is_first=False, mask=mask)
            if partly < end:
                yield Pair(queries, slice(partly, end), is_first=False)


@lru_cache(maxsize=32)
def _band(queries: int, keys: int, distance: int, window: int) -> Tensor:
    """Return a mask of keys; the first query is `distance` positions behind the first key."""
    apart = torch.arange(queries)[:, None] + distance - torch.arange(keys)
    return torch.zeros(queries, keys).masked_fill_((apart < 0) | (apart >= window), HIDDEN)


class _Blockwise(torch.autograd.Function):
    """Attention of queries [b, heads, s, d] to keys and values [b, kv heads, t, d] by a plan."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: Plan, scale: float
    ) -> Tensor:
        queries, keys, values = _by_key_head(query, key, value)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        sums = out.new_empty(out.shape[:-1], dtype=torch.float32)  # logarithms of the sums of exponentials
        for pair in plan:
            of_pair, sums_of_pair = _KERNEL(
                queries[:, :, pair.queries], keys[:, :, pair.keys], values[:, :, pair.keys], 0.0, pair.is_causal,
                attn_mask=_of_dtype(pair.mask, query.dtype), scale=scale,
            )  # fmt: skip
            known, sums_known = out[:, :, pair.queries], sums[:, :, pair.queries]
            if pair.is_first:
                known.copy_(of_pair)
                sums_known.copy_(sums_of_pair)
            else:
                both = torch.logaddexp(sums_known, sums_of_pair)
                shares = ((each - both).exp()[..., None] for each in (sums_known, sums_of_pair))
                known.copy_(known * next(shares) + of_pair * next(shares))
                sums_known.copy_(both)
        if sinks is not None:
            before = sums
            sums = torch.logaddexp(sums, _of_rows(sinks, sums))
            out.mul_((before - sums).exp_()[..., None].to(out.dtype))
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, out, sums = ctx.saved_tensors
        queries, keys, values = _by_key_head(query, key, value)
        gradient = gradient.reshape(out.shape)
        of_queries = torch.zeros_like(out)
        of_keys, of_values = (each.new_zeros(keys.size(0), *each.shape[2:]) for each in (key, value))
        for pair in ctx.plan:
            rows = pair.queries
            parts = _BACKWARD(
                gradient[:, :, rows], queries[:, :, rows], keys[:, :, pair.keys], values[:, :, pair.keys],
                out[:, :, rows], sums[:, :, rows], 0.0, pair.is_causal,
                attn_mask=_of_dtype(pair.mask, query.dtype), scale=ctx.scale,
            )  # fmt: skip
            of_queries[:, :, rows] += parts[0]
            of_keys[:, pair.keys] += parts[1].sum(1)
            of_values[:, pair.keys] += parts[2].sum(1)
        of_sinks = None
        if sinks is not None:
            along = (gradient * out).sum(-1, dtype=torch.float32)
            each = (_of_rows(sinks, sums) - sums).exp_().mul_(along)
            of_sinks = each.sum(-1).view(-1, len(sinks)).sum(0).neg_().to(sinks.dtype)
        return of_queries.view(query.shape), of_keys.view(key.shape), of_values.view(value.shape), of_sinks, None, None


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors [b * kv heads, queries of a key-value head, s, d]; its key is repeated without a copy."""
    sharing = query.size(1) // key.size(1)
    keys, values = (each.flatten(0, 1)[:, None].expand(-1, sharing, -1, -1) for each in (key, value))
    return query.unflatten(1, (-1, sharing)).flatten(0, 1), keys, values


def _of_rows(sinks: Tensor, sums: Tensor) -> Tensor:
    """Return the sinks of heads, shaped like the rows' sums."""
    return sinks.float().view(1, -1).expand(sums.size(0) * sums.size(1) // len(sinks), -1).reshape(*sums.shape[:2], 1)


def _of_dtype(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, HIDDEN)


def blockwise(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention by a plan.

    Args:
        query: [b, heads, s, d].
        key: [b, kv heads, t, d]; kv heads divide heads.
        value: [b, kv heads, t, size]; at most d.
        plan: Pairs of ranges of queries and of keys, for each of b alike.
        scale: Factor of the scores. None: `d ** -0.5`.
        sinks: [heads], a score of each head that takes a share of the softmax and has no value. None: none.

    Returns:
        [b, heads, s, size].
    """
    size, width = value.size(-1), query.size(-1)
    padded = value if size == width else F.pad(value, (0, width - size))  # the kernel has one size for both
    out: Any = _Blockwise.apply(query, key, padded, sinks, plan, width**-0.5 if scale is None else scale)
    return out[..., :size]
