"""Load balancing between data-parallel replicas. Pure."""

import heapq
from collections.abc import Sequence


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
