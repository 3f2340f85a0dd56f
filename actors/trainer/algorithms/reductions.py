"""Reductions of token losses to the loss of one optimizer step. B is the number of its samples."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.settings.recipe import AggMode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ReductionInputs:
    """Samples of one optimizer step, on all replicas: what a reduction of a user gets."""

    mask_sums: Ints  # [B], trained tokens of each sample
    rollouts: Ints  # [B], equal for the parts of one rollout
    groups: Ints  # [B], equal for the samples of one prompt


class Reduction(NamedTuple):
    """Weights and denominator of a step's loss: sum(token weight * token loss) / sum(shares)."""

    token_weights: Floats  # [B], weight of every trained token of a sample
    shares: Ints  # [B], a sample's share of the denominator


def reduction(
    mask_sums: Ints, rollouts: Ints, *, mode: AggMode, scale: int = 1, count_masked: bool = True
) -> Reduction:
    """Compute how the token losses of one optimizer step are reduced to its loss.

    - "token-mean": the mean over all trained tokens.
    - "rollout-mean": the mean over rollouts of each rollout's mean over its tokens. Its parts share a vote.
    - "seq-mean-token-mean": the mean over samples of each sample's mean over its tokens.
    - "seq-mean-token-sum-norm": the mean over rollouts of each rollout's sum over its tokens, divided by a constant.

    Args:
        mask_sums: [B], trained tokens of each sample.
        rollouts: [B], equal for the parts of one rollout.
        mode: One of the above.
        scale: Constant of "seq-mean-token-sum-norm", in tokens.
        count_masked: Whether a rollout (or sample) without trained tokens counts in the denominator.

    Source:
        token-mean: DAPO, arXiv 2503.14476. rollout-mean: GRPO, arXiv 2402.03300, as in slime, which counts rollouts
        without tokens; verl does not. A constant length: Dr. GRPO, arXiv 2503.20783. The names are verl's.
    """
    if mode == "token-mean":
        return Reduction(np.ones(len(mask_sums)), mask_sums)
    votes = np.arange(len(rollouts)) if mode == "seq-mean-token-mean" else rollouts
    _, first, inverse = np.unique(votes, return_index=True, return_inverse=True)
    sums = np.bincount(inverse, weights=mask_sums)
    shares = np.zeros(len(rollouts), dtype=np.int64)
    shares[first] = 1 if count_masked else sums > 0
    lengths = np.full(len(sums), float(scale)) if mode == "seq-mean-token-sum-norm" else np.maximum(sums, 1.0)
    return Reduction(1.0 / lengths[inverse], shares)
