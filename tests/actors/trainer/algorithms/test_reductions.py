"""Reductions of token losses: by hand."""

import numpy as np
import pytest

from actors.trainer.algorithms.reductions import AggMode, reduction


def test_reduction_per_token_is_the_mean_over_tokens() -> None:
    weights, shares = reduction(np.array([1, 3]), np.array([0, 1]), mode="token-mean")
    assert (weights.tolist(), shares.tolist()) == ([1.0, 1.0], [1, 3])


def test_reduction_per_rollout_gives_parts_one_vote_together() -> None:
    weights, shares = reduction(np.array([2, 2, 5]), np.array([4, 4, 9]), mode="rollout-mean")
    assert (weights.tolist(), shares.tolist()) == ([0.25, 0.25, 0.2], [1, 0, 1])


def test_a_rollout_without_trained_tokens_still_counts_in_the_denominator() -> None:
    weights, shares = reduction(np.array([0, 4]), np.array([0, 1]), mode="rollout-mean")
    assert np.isfinite(weights).all()
    assert shares.tolist() == [1, 1]


def test_reduction_by_sample_gives_each_part_a_vote() -> None:
    weights, shares = reduction(np.array([2, 2, 5]), np.array([4, 4, 9]), mode="seq-mean-token-mean")
    assert (weights.tolist(), shares.tolist()) == ([0.5, 0.5, 0.2], [1, 1, 1])


def test_reduction_by_a_constant_length_divides_every_token_alike() -> None:
    weights, shares = reduction(np.array([2, 2, 5]), np.array([4, 4, 9]), mode="seq-mean-token-sum-norm", scale=8)
    assert (weights.tolist(), shares.tolist()) == ([0.125] * 3, [1, 0, 1])


@pytest.mark.parametrize("mode", ["rollout-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_rollout_without_trained_tokens_may_be_left_out_of_the_denominator(mode: AggMode) -> None:
    sums, rollouts = np.array([0, 4, 0]), np.array([0, 1, 2])
    assert reduction(sums, rollouts, mode=mode, scale=4).shares.tolist() == [1, 1, 1]
    assert reduction(sums, rollouts, mode=mode, scale=4, count_masked=False).shares.tolist() == [0, 1, 0]
