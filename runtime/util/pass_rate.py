"""pass@k: the probability that at least one of k samples of a prompt passes."""

import math
from collections.abc import Sequence


def pass_rates(counts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Estimate pass@k without bias from n samples of each prompt, c of which pass: 1 - C(n - c, k) / C(n, k).

    Args:
        counts: n and c of each prompt.

    Returns:
        The mean over prompts for k = 1, 2, 4 and so on, up to the smallest n. Empty if that is below 2.

    Source:
        Chen et al., arXiv 2107.03374, as in slime.
    """
    rates: dict[int, float] = {}
    k, num_samples = 1, min((n for n, _ in counts), default=0)
    while 1 < num_samples and k <= num_samples:
        passed = [1 - math.comb(n - correct, k) / math.comb(n, k) for n, correct in counts]
        rates[k] = math.fsum(passed) / len(passed)
        k *= 2
    return rates
