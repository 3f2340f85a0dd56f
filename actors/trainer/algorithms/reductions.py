"""Reductions of token losses to the loss of one optimizer step. B is the number of its samples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Reduction(NamedTuple):
    """Weights and denominator of a step's loss: sum(token weight * token loss) / sum(shares)."""

    token_weights: Floats  # [B], weight of every trained token of a sample
    shares: Ints  # [B], a sample's share of the denominator


def reduction(mask_sums: Ints, rollouts: Ints, *, per_token: bool) -> Reduction:
    """Compute how the token losses of one optimizer step are reduced to its loss.

    Per token: the mean over all trained tokens. Otherwise: the mean over rollouts of each rollout's mean over its
    tokens. A rollout without trained tokens then counts in the denominator.

    Args:
        mask_sums: [B], trained tokens of each sample.
        rollouts: [B], equal for the parts of one rollout.
        per_token: True for the mean over tokens, False for the mean over rollouts.

    Source:
        Per token: DAPO, arXiv 2503.14476. Per rollout: GRPO, arXiv 2402.03300; rollouts without tokens as in slime.
    """
    if per_token:
        return Reduction(np.ones(len(mask_sums)), mask_sums)
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    rollout_sums = np.bincount(inverse, weights=mask_sums)
    shares = np.zeros(len(rollouts), dtype=np.int64)
    shares[first] = 1
    return Reduction(1.0 / np.maximum(rollout_sums, 1.0)[inverse], shares)
