"""Assignment of a batch's samples to optimizer steps, replicas and micro-batches. B samples."""

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from actors.trainer.data.batch import Ints, TrainBatch

WEIGHTS_PER_MICRO_BATCH: Final = 1 << 25  # overhead of one layer's calls on one CPU core, in weights times tokens


def split_steps(batch: TrainBatch, num_steps: int) -> list[Ints]:
    """Split a batch into optimizer steps of equally many rollouts, in order. The first steps get the remainder.

    Returns:
        The samples of each step. There are fewer steps if there are fewer rollouts.
    """
    num_rollouts = int(batch.rollouts_B[-1]) + 1
    cuts = [part[0] for part in np.array_split(np.arange(num_rollouts), min(num_steps, num_rollouts))]
    bounds = np.searchsorted(batch.rollouts_B, cuts[1:])
    return np.split(np.arange(len(batch.rollouts_B)), bounds)


def micro_batch_cost(layer_weights: int) -> int:
    """Estimate the overhead of one more micro-batch, in tokens. It is large where the layers are small.

    Args:
        layer_weights: Parameters of one layer.
    """
    return -(-WEIGHTS_PER_MICRO_BATCH // layer_weights)


def attention_cost(query_size: int, layer_weights: int) -> float:
    """Estimate the attention cost of each position that a token may see, in tokens.

    It counts scores and values, for half of the positions before the end.

    Args:
        query_size: Query elements of a token in one layer, over all heads.
        layer_weights: Parameters of one layer.
    """
    return query_size / layer_weights


def plan_micro_batches(
    lengths_B: Ints,
    samples: Ints,
    *,
    max_tokens: int,
    num_replicas: int,
    packed: bool,
    cost: int = 0,
    attention: float = 0.0,
    rollouts_B: Ints | None = None,
) -> list[list[Ints]]:
    """Distribute samples over replicas, with the same number of micro-batches each.

    Args:
        lengths_B: Tokens of every sample of the batch.
        samples: Samples to distribute.
        max_tokens: Largest micro-batch, padding included. A longer sample has a micro-batch of its own.
        num_replicas: Number of data-parallel replicas.
        packed: True: one row of concatenated sequences. False: padded rows of similar length.
        cost: Overhead of a micro-batch, in tokens. A further micro-batch must save more padding than this.
        attention: Attention cost of each position that a token may see, in tokens.
        rollouts_B: Rollout of every sample of the batch: samples of one rollout share a micro-batch. It may exceed
            `max_tokens` then. None: each sample is placed by itself.

    Returns:
        For each replica its micro-batches, each as the samples in it. Micro-batches are empty where there are too few
        samples. Replicas have about equal amounts of computation.
    """
    if rollouts_B is not None:
        return _plan_rollouts(
            lengths_B, samples, rollouts_B[samples], max_tokens, num_replicas, packed, cost, attention
        )
    order = samples[np.argsort(-lengths_B[samples], kind="stable")]
    bins = _first_fit(lengths_B, order, max_tokens) if packed else _by_length(lengths_B, order, max_tokens, cost)
    while len(bins) % num_replicas:
        bins.sort(key=len, reverse=True)
        largest = bins.pop(0)
        half = (len(largest) + 1) // 2
        bins += [largest[:half], largest[half:]]
    bins.sort(key=lambda members: -int(lengths_B[members].sum()))
    costs = [_operations(lengths_B[members], attention, packed=packed) for members in bins]
    return [[bins[index] for index in sorted(share)] for share in shared_out(costs, num_replicas)]


def _plan_rollouts(
    lengths_B: Ints,
    samples: Ints,
    rollouts: Ints,
    max_tokens: int,
    num_replicas: int,
    packed: bool,
    cost: int,
    attention: float,
) -> list[list[Ints]]:
    """Plan whole rollouts as if each were one sample: as long as its parts together, with padding.

    Padded rollouts all count as many rows as the largest one has, so that no micro-batch exceeds its limit.
    """
    order = np.argsort(rollouts, kind="stable")
    parts = np.split(samples[order], np.flatnonzero(np.diff(rollouts[order])) + 1)
    most = max(map(len, parts))
    lengths = [lengths_B[part].sum() if packed else most * lengths_B[part].max() for part in parts]
    planned = plan_micro_batches(
        np.array(lengths, dtype=np.int64),
        np.arange(len(parts)),
        max_tokens=max_tokens,
        num_replicas=num_replicas,
        packed=packed,
        cost=cost,
        attention=attention,
    )
    none = np.empty(0, dtype=np.int64)
    return [[np.concatenate([none, *(parts[unit] for unit in units.tolist())]) for units in share] for share in planned]


def _operations(lengths: Ints, attention: float, *, packed: bool) -> float:
    """Estimate the computation of a micro-batch, in tokens. Padded rows count their padding."""
    if not packed and len(lengths):
        lengths = np.full_like(lengths, lengths.max())
    return float((lengths + attention * lengths**2).sum())


def _by_length(lengths_B: Ints, order: Ints, max_tokens: int, cost: int) -> list[Ints]:
    """Split samples, longest first, so that padded tokens and the overhead of micro-batches cost least in total.

    Samples of one length stay together, up to the token limit.
    """
    runs = _runs(lengths_B[order], max_tokens)
    longest, bounds = lengths_B[order[runs[:-1]]], runs
    least = np.full(len(bounds), np.iinfo(np.int64).max)
    least[0] = 0
    before = np.zeros(len(bounds), dtype=np.int64)
    for begin, length in enumerate(longest.tolist()):
        padded = (bounds[begin + 1 :] - bounds[begin]) * length
        fits = max(int(np.searchsorted(padded, max_tokens, side="right")), 1)  # a longer sample is alone
        ends = slice(begin + 1, begin + 1 + fits)
        costs = least[begin] + cost + padded[:fits]
        better = costs < least[ends]
        least[ends] = np.where(better, costs, least[ends])
        before[ends] = np.where(better, begin, before[ends])
    cuts = [len(bounds) - 1]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return np.split(order, bounds[cuts[-2:0:-1]])


def _runs(lengths: Ints, max_tokens: int) -> Ints:
    """Return the starts of runs of equal length, then the end. No run has more padded tokens than the limit."""
    starts = np.flatnonzero(np.diff(lengths, prepend=0))
    ends = np.append(starts[1:], len(lengths))
    parts = [
        np.arange(start, end, max(max_tokens // int(lengths[start]), 1))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    return np.append(np.concatenate(parts), len(lengths))


def _first_fit(lengths_B: Ints, order: Ints, max_tokens: int) -> list[Ints]:
    """First-fit decreasing bin packing: each sample, longest first, goes to the first bin with room."""
    bins: list[list[int]] = []
    free: list[int] = []
    for sample in order.tolist():
        length = int(lengths_B[sample])
        place = next((index for index, room in enumerate(free) if room >= length), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[place].append(sample)
        free[place] -= length
    return [np.array(members, dtype=np.int64) for members in bins]


def shared_out(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Partition items into shares of equal count with nearly equal sums of costs.

    Args:
        costs: Cost of every item, not negative. The number of items is a multiple of num_shares.
        num_shares: Number of shares.

    Returns:
        The items of each share. The largest and the smallest sum differ by at most the range of costs within some
        num_shares consecutive items in order of cost.

    Raises:
        ValueError: The number of items is not a multiple of num_shares.

    Source:
        Karmarkar and Karp, The differencing method of set partitioning (1982), in the balanced form of Michiels, Korst,
        Aarts and van Leeuwen (2003). The sorted items form blocks of num_shares items. Two blocks are merged at a time,
        those with the largest differences first: the largest share of one with the smallest of the other.
    """
    if len(costs) % num_shares:
        raise ValueError(f"{len(costs)} items cannot be shared out equally among {num_shares}")
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    stretches = [order[begin : begin + num_shares] for begin in range(0, len(order), num_shares)]
    heap = [_solution(number, [(costs[item], [item]) for item in items]) for number, items in enumerate(stretches)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, some = heapq.heappop(heap)
        _, _, others = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(some, reversed(others), strict=True)]
        heapq.heappush(heap, _solution(number, joined))
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(num_shares)]


_Shares = list[tuple[float, list[int]]]  # sums and items, largest sum first


def _solution(number: int, shares: _Shares) -> tuple[float, int, _Shares]:
    """Build a heap entry: largest difference between shares first. The unique number breaks ties."""
    shares = sorted(shares, key=lambda share: -share[0])
    return shares[-1][0] - shares[0][0], number, shares
