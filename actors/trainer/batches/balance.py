"""Sharing out work so that nobody waits long for the others. Pure."""

import heapq
from collections.abc import Sequence


def shared_out(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Share items out, equally many to each, so that the sums of their costs differ little.

    Args:
        costs: of every item, not negative; their number is a multiple of num_shares.
        num_shares: how many get some.

    Returns:
        The items of each. The largest and the smallest sum differ by no more than the costs within some num_shares
        items that are neighbours in order of cost.

    Raises:
        ValueError: the items cannot be shared out equally.

    Source:
        Karmarkar and Karp, The differencing method of set partitioning (1982), in the balanced form of Michiels, Korst,
        Aarts and van Leeuwen (2003): stretches of the sorted items, one for each share, are joined two by two, those
        that differ most first, the largest share of one with the smallest of the other.
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


_Shares = list[tuple[float, list[int]]]  # sums and items, the largest first


def _solution(number: int, shares: _Shares) -> tuple[float, int, _Shares]:
    """In the order of a heap: those that differ most first; the number, which no other has, ends ties."""
    shares = sorted(shares, key=lambda share: -share[0])
    return shares[-1][0] - shares[0][0], number, shares
