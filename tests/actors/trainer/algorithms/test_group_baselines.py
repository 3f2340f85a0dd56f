"""Advantages of prompt groups: by hand, against numpy written from the formulae, and their invariants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms.group_baselines import grpo_advantages

SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0, 5.0])), min_size=1, max_size=24)


def advantages(rewards: list[float], groups: list[int], rollouts: list[int] | None = None, **options: bool) -> list:
    rollouts = list(range(len(rewards))) if rollouts is None else rollouts
    return grpo_advantages(np.array(rewards), np.array(groups), np.array(rollouts), **options).tolist()


def test_advantages_by_hand() -> None:
    scaled = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # mean 1/2; squared deviations sum to 1; n - 1 = 3
    assert advantages([1, 0, 0, 1], [7, 7, 7, 7]) == pytest.approx([scaled, -scaled, -scaled, scaled], rel=1e-12)


def test_groups_of_unequal_size_are_told_apart_by_their_id_not_by_their_place() -> None:
    rewards, groups = [1.0, 10.0, 0.0, 30.0, 2.0], [0, 1, 0, 1, 0]
    assert advantages(rewards, groups) == pytest.approx([0.0, -(0.5**0.5), -1.0, 0.5**0.5, 1.0], rel=1e-4, abs=1e-12)


def test_a_group_without_spread_has_no_advantage() -> None:
    assert advantages([3.0, 3.0, 3.0], [1, 1, 1]) == [0.0, 0.0, 0.0]


def test_a_group_of_one_has_no_advantage() -> None:
    assert advantages([3.0], [1]) == [0.0]


def test_without_normalization_the_reward_is_the_advantage() -> None:
    assert advantages([3.0, 1.0], [1, 1], normalize=False) == [3.0, 1.0]


def test_without_std_normalization_rewards_are_only_centred() -> None:
    assert advantages([3.0, 1.0], [1, 1], normalize_std=False) == [1.0, -1.0]


def test_parts_of_a_rollout_share_one_vote() -> None:
    whole = advantages([1.0, 0.0, 0.5], [0, 0, 0])
    parts = advantages([1.0, 1.0, 1.0, 0.0, 0.5], [0] * 5, [0, 0, 0, 1, 2])
    assert parts == pytest.approx([whole[0]] * 3 + whole[1:])


@given(SAMPLES, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_samples(samples: list, random) -> None:
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    expected = advantages(rewards, groups)
    order = list(range(len(samples)))
    random.shuffle(order)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-9)


@given(SAMPLES)
def test_advantages_match_the_formula_and_sum_to_zero_in_each_group(samples: list) -> None:
    rewards = np.array([reward for _, reward in samples])
    groups = np.array([group for group, _ in samples])
    result = np.array(advantages(list(rewards), list(groups)))
    for group in set(groups.tolist()):
        members = rewards[groups == group]
        std = np.sqrt(((members - members.mean()) ** 2).sum() / (len(members) - 1)) if len(members) > 1 else 0.0
        assert result[groups == group] == pytest.approx((members - members.mean()) / (std + 1e-6), abs=1e-6)
        assert abs(result[groups == group].sum()) < 1e-6


@pytest.mark.parametrize("normalize_std", [False, True])
def test_equal_rewards_give_advantages_of_exactly_0(normalize_std: bool) -> None:
    """The mean of three times 0.1 is 0.10000000000000002 in floating point."""
    groups, rollouts = np.zeros(4, dtype=np.int64), np.array([0, 0, 1, 2])
    found = grpo_advantages(np.full(4, 0.1), groups, rollouts, normalize_std=normalize_std)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_a_reward_that_float32_cannot_hold_is_no_vote(bad: float) -> None:
    groups, rollouts = np.array([0, 0, 0, 1, 1, 1]), np.arange(6)
    rewards = np.array([1.0, bad, 0.0, bad, bad, 2.0])
    found = grpo_advantages(rewards, groups, rollouts, normalize_std=False)
    np.testing.assert_equal(found, [0.5, np.nan, -0.5, np.nan, np.nan, 0.0])
    np.testing.assert_equal(grpo_advantages(rewards, groups, rollouts, normalize=False)[[1, 2]], [np.nan, 0.0])
