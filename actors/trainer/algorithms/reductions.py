"""Reductions of token losses to the loss of one optimizer step. B is the number of its samples.

Example:
    ```python
    import numpy as np

    from actors.trainer.algorithms.reductions import reduction

    token_losses = [np.array([1.0, 3.0]), np.array([2.0]), np.array([])]  # of three samples; the last one is masked
    weights, shares = reduction([2, 1, 0], [0, 1, 2], mode="rollout-mean")
    loss = sum(w * losses.sum() for w, losses in zip(weights, token_losses)) / shares.sum()
    assert np.isclose(loss, (2.0 + 2.0 + 0.0) / 3)
    weights, shares = reduction([2, 1, 0], [0, 1, 2], mode="token-mean")
    assert np.isclose(sum(w * losses.sum() for w, losses in zip(weights, token_losses)) / shares.sum(), 6.0 / 3)
    of_component, own_shares = reduction([0, 1, 0], [0, 1, 2], mode="token-mean")  # a term of the second sample alone
    assert of_component[1] * token_losses[1].sum() / own_shares.sum() == 2.0
    ```
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.trainer.algorithms.arguments import Floats, check_choice, floats, group_numbers

Ints = NDArray[np.int64]
AggMode = Literal["rollout-mean", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


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
    mask_sums: ArrayLike,
    rollouts: ArrayLike,
    *,
    mode: AggMode = "rollout-mean",
    scale: int = 1,
    count_masked: bool = True,
) -> Reduction:
    """Compute how the token losses of one optimizer step are reduced to its loss.

    Tokens are trained tokens. The parts of a rollout share a vote. The loss is sum(token weight * token loss) /
    max(sum(shares), 1). For a component with tokens of its own, such as a likelihood of good samples, `mask_sums`
    counts these tokens alone: with "token-mean" each component is then a mean over its own count, as in prime-rl.

    Args:
        mask_sums: [B], integers, trained tokens of each sample.
        rollouts: [B], integers or texts, equal for the parts of one rollout.
        mode: Type of `algorithm.reduction`.
        scale: Constant of "seq-mean-token-sum-norm", in tokens.
        count_masked: Whether a rollout (or sample) without trained tokens counts in the denominator.

    Returns:
        Token weights, [B], float64, one for all tokens of a sample; and shares, [B], int64.

    Edges:
        A sample without trained tokens has no token to weigh. All masked: with count_masked the loss is 0 over the
        number of rollouts, without it 0 / 1. No samples: empty arrays.

    Source:
        token-mean: DAPO, arXiv 2503.14476. rollout-mean: GRPO, arXiv 2402.03300, as in slime, which counts rollouts
        without tokens; verl does not. A constant length: Dr. GRPO, arXiv 2503.20783. The names are verl's, whose
        seq-mean-token-sum is "seq-mean-token-sum-norm" with scale = 1, and whose token-sum has no counterpart. verl
        adds 1e-8 to the lengths that it divides by.

    Raises:
        ValueError: The mode is unknown, or the columns differ in length.
    """
    check_choice("mode", mode, AggMode)
    counts = floats("mask_sums", mask_sums).astype(np.int64)
    votes = group_numbers("rollouts", rollouts, len(counts))
    if mode == "token-mean":
        return Reduction(np.ones(len(counts)), counts)
    if mode == "seq-mean-token-mean":
        votes = np.arange(len(counts))
    _, first, inverse = np.unique(votes, return_index=True, return_inverse=True)
    sums = np.bincount(inverse, weights=counts)
    shares = np.zeros(len(counts), dtype=np.int64)
    shares[first] = 1 if count_masked else sums > 0
    lengths = np.full(len(sums), float(scale)) if mode == "seq-mean-token-sum-norm" else np.maximum(sums, 1.0)
    return Reduction(1.0 / lengths[inverse], shares)
