"""Advantages of prompt groups: by hand, against numpy written from the formulae, and their invariants."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms.group_baselines import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from tests.actors.trainer.algorithms.peers import GROUPS, LENGTHS, REWARDS, VERL

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


Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo_advantages,
    "dr_grpo": lambda *given: grpo_advantages(*given, normalize_std=False),
    "rloo": rloo_advantages,
    "opo": lambda rewards, groups, rollouts: opo_advantages(
        rewards, groups, rollouts, 1 + rollouts
    ),  # lengths of 1, 2, ...
    "gpg": gpg_advantages,
    "maxrl": maxrl_advantages,
    "grpo_passk": passk_advantages,
}
BY_NAME = pytest.mark.parametrize("name", ESTIMATORS)


def of(name: str, rewards: list[float], groups: list[int], rollouts: list[int] | None = None) -> list[float]:
    order = range(len(rewards)) if rollouts is None else rollouts
    return ESTIMATORS[name](np.array(rewards), np.array(groups), np.array(order)).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1.0, -0.5, -0.5, 0.0]),  # 2 - (1 + 1) / 2; 1 - (2 + 1) / 2
        ("opo", [2 - 7 / 6, 1 - 7 / 6, 1 - 7 / 6, 0.0]),  # (1 * 2 + 2 * 1 + 3 * 1) / 6
        ("gpg", [2 / 3 * 4 / 3, -1 / 3 * 4 / 3, -1 / 3 * 4 / 3, 0.0]),  # 3 of 4 rewards are not 0
        ("maxrl", [0.5, -0.25, -0.25, 0.0]),  # mean 4 / 3
        ("grpo_passk", [1 / (3**-0.5 + 1e-6), 0.0, 0.0, 0.0]),  # deviations 2/3, -1/3, -1/3: variance 1/3
    ],
)
def test_estimators_by_hand(name: str, expected: list[float]) -> None:
    assert of(name, [2.0, 1.0, 1.0, 0.0], [3, 3, 3, 8]) == pytest.approx(expected, rel=1e-12)


def test_reinforce_subtracts_the_mean_of_the_batch_or_nothing() -> None:
    rewards, rollouts = np.array([1.0, 0.0, 0.5, 0.5]), np.array([0, 1, 2, 2])
    assert reinforce_advantages(rewards, rollouts).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert reinforce_advantages(rewards, rollouts, normalize=False).tolist() == [1.0, 0.0, 0.5, 0.5]
    assert reinforce_advantages(np.full(3, 0.7), np.arange(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_estimators_are_those_of_verl(name: str) -> None:
    given = REWARDS, GROUPS, np.arange(len(REWARDS))
    found = opo_advantages(*given, np.array(LENGTHS)) if name == "opo" else ESTIMATORS[name](*given)
    assert found == pytest.approx(np.array(VERL["advantages"][name]), abs=1e-6)


@BY_NAME
@given(st.sampled_from([0.1, 0.3, 0.7, 0.9, -0.2, 1e6]), st.integers(1, 16), st.sampled_from([np.float32, np.float64]))
def test_equal_rewards_give_exactly_0(name: str, reward: float, count: int, dtype: type) -> None:
    """Also two groups of different rewards."""
    rewards = np.repeat(np.array([reward, 0.5], dtype=dtype), count)
    groups = np.repeat([4, 9], count)
    assert ESTIMATORS[name](rewards, groups, np.arange(2 * count)).tolist() == [0.0] * (2 * count)


@BY_NAME
@given(SAMPLES, st.randoms(use_true_random=False))
def test_estimators_do_not_depend_on_the_order_of_samples(name: str, samples: list, random) -> None:
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    expected, order = of(name, rewards, groups), list(range(len(samples)))
    random.shuffle(order)
    shuffled = of(name, [rewards[i] for i in order], [groups[i] for i in order], order)
    if name == "grpo_passk":  # of equal best rewards any may be first; then the advantage is 0
        expected, shuffled = sorted(expected), sorted(shuffled)
        order = list(range(len(samples)))
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gpg"])  # alpha counts the whole batch
@given(SAMPLES)
def test_another_group_changes_nothing(name: str, samples: list) -> None:
    """A group that is dropped, or has more samples, changes no other group."""
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    alone = of(name, rewards, groups)
    more = of(name, [*rewards, 5.0, 0.0, 5.0], [*groups, 99, 99, 99])
    assert more[: len(alone)] == pytest.approx(alone, abs=1e-12)


@BY_NAME
def test_parts_of_one_rollout_share_its_vote(name: str) -> None:
    if name == "opo":
        lengths = np.array([1, 2, 3, 4])
        groups, rollouts = np.zeros(4, dtype=int), np.array([0, 0, 1, 2])
        parts = opo_advantages(np.array([1.0, 1.0, 0.0, 0.5]), groups, rollouts, lengths)
        whole = opo_advantages(np.array([1.0, 0.0, 0.5]), groups[:3], np.arange(3), np.array([3, 3, 4]))
        assert parts.tolist() == pytest.approx([whole[0], *whole.tolist()])
        return
    whole = of(name, [1.0, 0.0, 0.5], [0, 0, 0])
    parts = of(name, [1.0, 1.0, 1.0, 0.0, 0.5], [0] * 5, [0, 0, 0, 1, 2])
    assert parts == pytest.approx([whole[0]] * 3 + whole[1:])


@BY_NAME
def test_an_excluded_reward_is_no_vote(name: str) -> None:
    found = of(name, [1.0, float("nan"), 0.0, 2.0, 1e300], [0, 0, 0, 1, 1], [0, 1, 2, 3, 4])
    clean = of(name, [1.0, 0.0, 2.0], [0, 0, 1], [0, 2, 3])
    assert [math.isnan(value) for value in found] == [False, True, False, False, True]
    assert [found[0], *found[2:4]] == pytest.approx(clean)


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages, passk_advantages])
def test_a_group_of_one_gets_0_or_its_reward(estimator: Callable[..., np.ndarray]) -> None:
    given = np.array([3.0, 1.0, 2.0, 2.0]), np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])
    assert estimator(*given)[[0, 3]].tolist() == [0.0, 0.0]
    assert estimator(*given, group_of_one="reward")[[0, 3]].tolist() == [3.0, 2.0]


def test_a_mean_of_0_or_less_gives_maxrl_no_signal() -> None:
    assert of("maxrl", [-1.0, 1.0, -3.0, 1.0], [0, 0, 1, 1]) == [0.0] * 4


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5], [0.1, 0.3, 0.2]])
def test_rollouts_of_equal_mean_have_no_spread_whatever_their_parts(rewards: list[float]) -> None:
    assert grpo_advantages(rewards, [0, 0, 0], [0, 0, 1]).tolist() == [0.0, 0.0, 0.0]
    assert gdpo_advantages({"a": rewards}, [0, 0, 0], [0, 0, 1]).tolist() == [0.0, 0.0, 0.0]


def test_maxrl_of_one_rollout_in_parts_and_of_tiny_means() -> None:
    assert maxrl_advantages([1.0, 0.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]
    assert maxrl_advantages([5e-324, 5e-324], [0, 0]).tolist() == [0.0, 0.0]
    assert maxrl_advantages([1e-310, 0.0, 3e-310], [0, 0, 0]).tolist() == pytest.approx([-0.25, -1.0, 1.25])
