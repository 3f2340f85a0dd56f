"""Reductions of token losses: by hand."""

import numpy as np

from actors.trainer.algorithms.reductions import reduction


def test_reduction_per_token_is_the_mean_over_tokens() -> None:
    weights, shares = reduction(np.array([1, 3]), np.array([0, 1]), per_token=True)
    assert (weights.tolist(), shares.tolist()) == ([1.0, 1.0], [1, 3])


def test_reduction_per_rollout_gives_parts_one_vote_together() -> None:
    weights, shares = reduction(np.array([2, 2, 5]), np.array([4, 4, 9]), per_token=False)
    assert (weights.tolist(), shares.tolist()) == ([0.25, 0.25, 0.2], [1, 0, 1])


def test_a_rollout_without_trained_tokens_still_counts_in_the_denominator() -> None:
    weights, shares = reduction(np.array([0, 4]), np.array([0, 1]), per_token=False)
    assert np.isfinite(weights).all()
    assert shares.tolist() == [1, 1]
