"""The gated delta rule in chunks: linear attention whose state each position decays, corrects and reads.

A chunk's positions are computed at once, and the state passes from chunk to chunk. Forward and backward pass take time
and memory in proportion to the positions. Samples of a packed row have states of their own, which begin with zeros, or
with the state behind their prompt if samples share it.

Shapes: t positions, n chunks of C positions, G key heads with r value heads each, K key and V value sizes.

Source:
    Gated Delta Networks, arXiv 2412.06464, section 3.3; the chunked form is that of DeltaNet, arXiv 2406.06484.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.megatron.layers.blockwise import Row

SIZES: Final = (16, 32, 64)  # positions of a chunk; the smallest that holds a stretch of mean length
TINY: Final = 1e-6  # added to the squared length of a query or key, as in transformers


class Wave(NamedTuple):
    """Chunks whose states can be computed at once: equally many chunks lie before each in its sample."""

    chunks: slice
    parents: Tensor | None  # the chunk before each, numbered within the wave before; None: the same number


class Chunks(NamedTuple):
    """The positions of a row in chunks, wave after wave."""

    places: Tensor  # [n * C], position; t where a chunk has none
    back: Tensor  # [t], where each position is in `places`
    size: int  # C
    waves: tuple[Wave, ...]
    earlier: Tensor  # [t + 1], the position before each in its sample; t: none

    @classmethod
    def of(cls, row: Row, device: torch.device) -> "Chunks":
        """Divide a row into chunks."""
        total, (starts, follows) = len(row.sequences), row.stretches()
        lengths = np.diff(np.append(starts, total))
        size = next((size for size in SIZES if size >= lengths.mean()), SIZES[-1])
        counts = -(-lengths // size)
        firsts = np.cumsum(counts) - counts  # number of each stretch's first chunk, stretch by stretch
        number = int(counts.sum())
        within = np.arange(number) - np.repeat(firsts, counts)
        before = np.where(follows >= 0, counts[follows], 0)
        parents = np.where(within > 0, np.arange(number) - 1, np.repeat(_last(firsts, counts, follows), counts))
        depths = within + np.repeat(before, counts)
        order = np.argsort(depths, kind="stable")
        begin = np.repeat(starts, counts) + within * size
        inside = begin[order, None] + np.arange(size)
        places = np.where(inside < np.repeat(starts + lengths, counts)[order, None], inside, total).ravel()
        back = np.empty(total + 1, dtype=np.int64)
        back[places] = np.arange(len(places))
        earlier = np.arange(-1, total)
        earlier[starts] = np.where(follows >= 0, (starts + lengths)[follows] - 1, total)
        earlier = np.append(earlier[:total], total)
        waves = _waves(depths[order], order, parents, device)
        columns = (torch.from_numpy(column).to(device) for column in (places, back[:total], earlier))
        placed, returned, previous = columns
        return cls(placed, returned, size, waves, previous)


def _last(firsts: np.ndarray, counts: np.ndarray, follows: np.ndarray) -> np.ndarray:
    """Return the number of the chunk before each stretch; -1: none."""
    return np.where(follows >= 0, (firsts + counts)[follows] - 1, -1)


def _waves(depths: np.ndarray, order: np.ndarray, parents: np.ndarray, device: torch.device) -> tuple[Wave, ...]:
    """Return the waves of chunks in order."""
    bounds = np.searchsorted(depths, np.arange(int(depths[-1]) + 2))
    where = np.empty(len(order), dtype=np.int64)
    where[order] = np.arange(len(order))
    waves = [Wave(slice(0, int(bounds[1])), None)]
    for begin, start, stop in zip(bounds[:-2].tolist(), bounds[1:-1].tolist(), bounds[2:].tolist(), strict=True):
        own = where[parents[order[start:stop]]] - begin
        is_same = len(own) == start - begin and bool((own == np.arange(len(own))).all())
        waves.append(Wave(slice(start, stop), None if is_same else torch.from_numpy(own).to(device)))
    return tuple(waves)


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Select rows of values [t, ...]; the index t selects zeros."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])]).index_select(0, index)


class _Arranged(torch.autograd.Function):
    """Rows in another order, each at most once; `back` is the inverse of the index, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, back: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(index, back)
        return _taken(values, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, back = ctx.saved_tensors
        return _taken(gradient, back), None, None


class _Convolved(torch.autograd.Function):
    """Causal convolution of [t, channels] along each sample, channel by channel, with a weight [channels, width]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, earlier: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(values, weight, earlier)
        out, index = values * weight[:, -1], earlier
        for tap in reversed(range(weight.size(1) - 1)):
            out.addcmul_(_taken(values, index[:-1]), weight[:, tap])
            index = earlier[index]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, weight, earlier = ctx.saved_tensors
        of_values, index = F.pad(gradient * weight[:, -1], (0, 0, 0, 1)), earlier
        of_weight = torch.empty_like(weight)
        of_weight[:, -1] = (gradient * values).sum(0)
        for tap in reversed(range(weight.size(1) - 1)):
            of_values.index_add_(0, index[:-1], gradient * weight[:, tap])
            of_weight[:, tap] = (gradient * _taken(values, index[:-1])).sum(0)
            index = earlier[index]
        return of_values[:-1], of_weight, None


def convolved(values: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Convolve each channel causally along its sample, without a bias.

    Args:
        values: [t, channels].
        weight: [channels, width]; the last column is a position's own.
        chunks: Positions of the row.

    Returns:
        [t, channels].
    """
    out: Any = _Convolved.apply(values, weight, chunks.earlier)
    return out


class _Between(torch.autograd.Function):
    """Decays [..., C, C] from the second position to the first, given the sums [..., C] of logarithms up to each.

    Sums are large and their differences small, so the sums are float64. Each is two float32 numbers in the differences,
    which are as exact so, and take half of the memory.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        high = sums.float()
        low = (sums - high).float()
        between = high[..., :, None] - high[..., None, :]
        between += low[..., :, None]
        between -= low[..., None, :]
        later = torch.ones(between.shape[-2:], dtype=torch.bool, device=sums.device).triu(1)
        between.masked_fill_(later, -torch.inf).exp_()
        ctx.save_for_backward(between)
        return between

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (between,) = ctx.saved_tensors
        products = gradient * between
        return products.sum(-1, dtype=torch.float64) - products.sum(-2, dtype=torch.float64)


class _Scan(torch.autograd.Function):
    """Outputs [n, heads, C, V] of chunks, given what each does to the state [heads, K, V] that it begins with.

    A chunk reads the state by `queries`, adds what its positions read of each other, and leaves a state that is decayed
    and has its `keys` times its corrected values added.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        values: Tensor,  # [n, heads, C, V], to write into a state of zeros
        corrections: Tensor,  # [n, heads, C, K], read what the state already says of them
        queries: Tensor,  # [n, heads, C, K]
        keys: Tensor,  # [n, heads, C, K]
        mixing: Tensor,  # [n, heads, C, C]
        decays: Tensor,  # [n, heads, 1, 1], of the state over the chunk
        waves: tuple[Wave, ...],
    ) -> Tensor:
        states = values.new_zeros(*values.shape[:2], keys.size(-1), values.size(-1))
        written, left = values.clone(), values.new_zeros(0)
        for number, (own, parents) in enumerate(waves):
            if number:
                states[own] = left if parents is None else left.index_select(0, parents)
                written[own] -= corrections[own] @ states[own]
            left = states[own] * decays[own] + keys[own].transpose(2, 3) @ written[own]
        ctx.waves = waves
        ctx.save_for_backward(corrections, queries, keys, mixing, decays, states, written)
        return queries @ states + mixing @ written

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        corrections, queries, keys, mixing, decays, states, written = ctx.saved_tensors
        of_written = mixing.transpose(2, 3) @ gradient
        of_keys, of_decays = torch.zeros_like(keys), torch.zeros_like(decays)
        after: Tensor | None = None  # gradient of the states that this wave leaves; None: nothing follows
        for number in reversed(range(len(ctx.waves))):
            own, parents = ctx.waves[number]
            of_states = queries[own].transpose(2, 3) @ gradient[own]
            if after is not None:
                of_written[own] += keys[own] @ after
                of_keys[own] = written[own] @ after.transpose(2, 3)
                of_decays[own] = (states[own] * after).sum((2, 3), keepdim=True)
                of_states += decays[own] * after
            of_states -= corrections[own].transpose(2, 3) @ of_written[own]
            if number:
                after = of_states if parents is None else _added(of_states, parents, ctx.waves[number - 1].chunks)
        across = states.transpose(2, 3)
        return (
            of_written, -(of_written @ across), gradient @ across, of_keys, gradient @ written.transpose(2, 3),
            of_decays, None,
        )  # fmt: skip


def _added(of_states: Tensor, parents: Tensor, before: slice) -> Tensor:
    """Add up the gradients of the states that several chunks took from one of the wave before."""
    return of_states.new_zeros(before.stop - before.start, *of_states.shape[1:]).index_add_(0, parents, of_states)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, chunks: Chunks) -> Tensor:
    """Compute linear attention by the gated delta rule, in float32.

    A position decays the state, replaces a share of what the state says of its key by its value, and reads the state by
    its query. Queries and keys are scaled to length 1, queries by `K ** -0.5` besides.

    Args:
        query: [t, G, K].
        key: [t, G, K].
        value: [t, G, r, V].
        decay: [t, G, r], logarithm of the state's decay, at most 0.
        rate: [t, G, r], the share, from 0 to 1.
        chunks: Positions of the row.

    Returns:
        [t, G, r, V], in float32.
    """
    given = (query[:, :, None], key[:, :, None], value, decay[..., None], rate[..., None])
    query, key, value, decay, rate = (_in_chunks(each.float(), chunks) for each in given)
    query, key = _unit(query) * query.size(-1) ** -0.5, _unit(key)
    sums = decay.squeeze(-1).double().cumsum(-1)
    between: Any = _Between.apply(sums)
    left = (sums[..., -1:] - sums).float().exp()[..., None]
    grown = sums.float().exp()[..., None]
    system = rate * ((key @ key.transpose(3, 4)) * between)
    sides = torch.cat([rate * value, rate * grown * key], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, corrections = solved.split([value.size(-1), key.size(-1)], -1)
    mixing = (query @ key.transpose(3, 4)) * between
    parts = (values, corrections, query * grown, key * left, mixing, grown[..., -1:, :])
    out: Any = _Scan.apply(*(part.flatten(1, 2) for part in parts), chunks.waves)
    rows = out.view(*value.shape).permute(0, 3, 1, 2, 4).flatten(0, 1)
    back: Any = _Arranged.apply(rows, chunks.back, chunks.places)
    return back


def _in_chunks(values: Tensor, chunks: Chunks) -> Tensor:
    """Lay [t, G, r, size] out as [n, G, r, C, size], with zeros where a chunk has no position."""
    rows: Any = _Arranged.apply(values, chunks.places, chunks.back)
    return rows.unflatten(0, (-1, chunks.size)).permute(0, 2, 3, 1, 4)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + TINY)
