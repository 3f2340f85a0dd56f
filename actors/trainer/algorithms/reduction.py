"""How token losses become the loss of an optimizer step. B samples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Reduction(NamedTuple):
    """How a step's token losses become one number: sum of weight times loss over tokens, divided by sum of shares."""

    token_weights: Floats  # [B], of every trained token of a sample
    shares: Ints  # [B], a sample's share of the denominator


def reduction(mask_sums: Ints, rollouts: Ints, *, per_token: bool) -> Reduction:
    """Weigh the samples of one optimizer step.

    Args:
        mask_sums: [B], trained tokens of each sample.
        rollouts: [B], equal for the parts of one rollout.
        per_token: mean over trained tokens; else the mean over rollouts of each rollout's mean over its tokens.
            There a rollout without any trained token counts in the denominator, as in slime.
    """
    if per_token:
        return Reduction(np.ones(len(mask_sums)), mask_sums)
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    rollout_sums = np.bincount(inverse, weights=mask_sums)
    shares = np.zeros(len(rollouts), dtype=np.int64)
    shares[first] = 1
    return Reduction(1.0 / np.maximum(rollout_sums, 1.0)[inverse], shares)
