"""GDPO, ReMax and the length penalties: by hand, their laws, and against verl and prime-rl."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms.group_baselines import gdpo_advantages, grpo_advantages, remax_advantages
from actors.trainer.algorithms.length_penalties import linear_length_penalties, overlong_penalties
from actors.trainer.algorithms.whitening import whiten
from tests.actors.trainer.algorithms.peer_inputs import BASELINES, SECOND, TURNS, WEIGHTS
from tests.actors.trainer.algorithms.peers import GROUPS, LENGTHS, PRIME_RL, REWARDS, VERL

NAMED = {"right": REWARDS, "short": np.array(SECOND)}
WEIGHTED = dict(zip(NAMED, WEIGHTS, strict=True))
ROLLOUTS = np.arange(len(REWARDS))


def test_gdpo_by_hand() -> None:
    """Rewards 1, 0 and 2, 4: each column is +-1 / sqrt(2) of its deviation."""
    named = {"a": np.array([1.0, 0.0]), "b": np.array([2.0, 4.0])}
    found = gdpo_advantages(named, [3, 3], weights={"b": 0.5})
    first, second = 0.5 / (0.5**0.5 + 1e-6), 1.0 / (2**0.5 + 1e-6)
    assert found == pytest.approx([first - 0.5 * second, -first + 0.5 * second], rel=1e-12)
    plain = gdpo_advantages(named, [3, 3], normalize_std=False)
    assert plain.tolist() == [0.5 - 1.0, -0.5 + 1.0]


def test_gdpo_is_that_of_verl() -> None:
    found = gdpo_advantages(NAMED, GROUPS, ROLLOUTS, weights=WEIGHTED)
    tokens = whiten(np.repeat(found, LENGTHS), np.ones(sum(LENGTHS), dtype=bool))
    starts = np.cumsum([0, *LENGTHS[:-1]])
    assert tokens[starts] == pytest.approx(np.array(VERL["advantages"]["gdpo"]), abs=1e-6)


def test_gdpo_of_one_reward_is_grpo() -> None:
    assert gdpo_advantages({"one": REWARDS}, GROUPS).tolist() == grpo_advantages(REWARDS, GROUPS).tolist()


@given(st.sampled_from([0.1, 0.3, 0.7, 1e6]), st.integers(1, 12), st.sampled_from([np.float32, np.float64]))
def test_equal_rewards_give_exactly_0(reward: float, count: int, dtype: type) -> None:
    equal = np.full(count, reward, dtype=dtype)
    assert gdpo_advantages({"a": equal, "b": -equal}, np.zeros(count, dtype=int)).tolist() == [0.0] * count
    assert remax_advantages(equal, equal).tolist() == [0.0] * count


def test_a_group_of_one_gets_0_or_its_weighted_rewards() -> None:
    named = {"a": [3.0], "b": [2.0]}
    assert gdpo_advantages(named, [0]).tolist() == [0.0]
    assert gdpo_advantages(named, [0], group_of_one="reward", weights={"b": 0.5}).tolist() == [4.0]


def test_a_sample_without_one_of_its_rewards_counts_under_no_name() -> None:
    named = {"a": np.array([1.0, 0.0, 5.0]), "b": np.array([0.0, 1.0, np.nan])}
    found = gdpo_advantages(named, [0, 0, 0])
    clean = gdpo_advantages({name: rewards[:2] for name, rewards in named.items()}, [0, 0])
    np.testing.assert_equal(found, [*clean, np.nan])


def test_another_group_changes_nothing() -> None:
    alone = gdpo_advantages(NAMED, GROUPS)
    more = {name: np.append(rewards, [9.0, 0.0]) for name, rewards in NAMED.items()}
    assert gdpo_advantages(more, np.append(GROUPS, [7, 7]))[:-2].tolist() == alone.tolist()


def test_gdpo_without_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        gdpo_advantages({}, [0])


def test_remax_is_that_of_verl_and_excludes_what_is_no_number() -> None:
    found = remax_advantages(REWARDS, np.array(BASELINES))
    assert found == pytest.approx(np.array(VERL["advantages"]["remax"]), abs=1e-6)
    assert found.tolist() == (REWARDS - np.array(BASELINES)).tolist()
    np.testing.assert_equal(
        remax_advantages([1.0, np.nan, 1.0, 1.0], [0.25, 0.0, np.nan, 1e300]), [0.75, np.nan, np.nan, np.nan]
    )


def test_the_overlong_penalty_is_that_of_verl_and_falls_beyond_the_maximum() -> None:
    found = overlong_penalties(range(15), max_response_len=10, buffer_len=4, factor=0.5)
    assert found.tolist() == pytest.approx(VERL["advantages"]["overlong"], abs=1e-12)
    assert found[[6, 7, 10, 14]].tolist() == [0.0, -0.125, -0.5, -1.0]
    assert not np.signbit(found[:7]).any()


def test_the_length_penalty_is_that_of_prime_rl() -> None:
    one = np.zeros(len(REWARDS), dtype=int)
    turns = np.array(TURNS)
    penalties = linear_length_penalties(REWARDS, one, output_lens=LENGTHS, input_lens=turns, num_turns=turns)
    found = grpo_advantages(REWARDS + penalties, one, normalize_std=False)
    assert found == pytest.approx(np.array(PRIME_RL["length_penalty"]), abs=1e-6)


def test_the_length_penalty_by_hand() -> None:
    """Mean reward 0.5; a group's maxima are its own, and the parts of a rollout are added up."""
    sizes = {"output_lens": [4, 2, 2, 9], "input_lens": [0, 0, 0, 1], "num_turns": [1, 1, 1, 1]}
    found = linear_length_penalties([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 8], [0, 1, 1, 2], **sizes)
    shares = [0.25 + 0.05, 0.25 + 0.1, 0.25 + 0.1, 0.25 + 0.1 + 0.1]
    assert found == pytest.approx([-0.5 * shares[0], -0.5 * shares[1], -0.5 * shares[2], -shares[3]], rel=1e-12)


@given(st.integers(1, 8), st.sampled_from([0.1, 0.7, 1.0]))
def test_equal_rewards_and_lengths_still_give_exactly_0(count: int, reward: float) -> None:
    groups, rewards = np.zeros(count, dtype=int), np.full(count, reward)
    sizes = np.full(count, 3)
    penalties = linear_length_penalties(rewards, groups, output_lens=sizes, input_lens=sizes, num_turns=sizes)
    assert grpo_advantages(rewards + penalties, groups).tolist() == [0.0] * count


def test_an_excluded_reward_is_in_no_mean() -> None:
    sizes = {"output_lens": [2, 4], "input_lens": [1, 1], "num_turns": [1, 1]}
    found = linear_length_penalties([1.0, np.nan], [0, 0], **sizes)
    assert found[0] == pytest.approx(-(0.25 / 2 + 0.1 + 0.1))
    assert linear_length_penalties([np.nan], [0], output_lens=[1], input_lens=[1], num_turns=[1]).tolist() == [0.0]
