"""Returns and advantages per token: by hand, against loops, at the edges, and as in slime and verl."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms.returns import (
    BLOCK,
    CHUNK,
    discounted_returns,
    gae,
    ppo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    token_rewards,
)
from actors.trainer.algorithms.whitening import whiten
from tests.actors.trainer.algorithms.peer_inputs import BY_LENGTH, GAMMA, KL_COEF, LAMBD, OF_RETURNS
from tests.actors.trainer.algorithms.peers import GROUPS, KL, LENGTHS, NEMO_RL, REWARDS, SLIME, TRAINS, VERL, column

EVERY = np.ones(len(TRAINS), dtype=bool)
PEER_VALUES = column("rollout").double().numpy()


def looped(rewards: Any, values: Any, mask: Any, gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    """GAE of one sample, one token at a time; tokens outside of the mask are skipped."""
    following = next_value = 0.0
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for token in range(len(rewards) - 1, -1, -1):
        if mask[token]:
            following = rewards[token] + gamma * next_value - values[token] + gamma * lambd * following
            next_value = values[token]
            advantages[token], returns[token] = following, following + next_value
    return advantages, returns


def test_a_reward_is_on_the_last_token_of_the_mask_and_the_divergence_on_each() -> None:
    mask = np.array([False, True, True, False, True, True])
    found = token_rewards([2.0, 4.0], [4, 2], mask, [9.0, 1.0, 2.0, 9.0, 4.0, 8.0], kl_coef=0.5)
    assert found.tolist() == [0.0, -0.5, 1.0, 0.0, -2.0, 0.0]
    assert token_rewards([2.0, 4.0], [4, 2], mask).tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 4.0]


def test_rewards_per_token_are_on_their_tokens_and_the_rest_on_the_last() -> None:
    mask = np.array([False, True, True, False, True, False, False, True])
    earned = [0.0, 1.0, 0.0, 2.0, 0.0, 4.0, 0.0, 8.0]  # 2 is of a token that does not count, 4 comes before the first
    found = token_rewards([3.5, 12.0], [5, 3], mask, rewards_per_token=earned)
    assert found.tolist() == [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 0.0, 12.0]
    assert token_rewards([3.0, 5.0], [2, 1], [False, False, True], None, [1.0, 2.0, 5.0]).tolist() == [0.0, 0.0, 5.0]
    every = np.ones(3, dtype=bool)
    found = ppo_advantages([3.0], np.zeros(3), [3], every, None, [2.0, 0.0, 1.0], gamma=0.5)
    assert found.advantages.tolist() == [2.25, 0.5, 1.0]
    found = reinforce_plus_plus_advantages([3.0], [3], every, every, None, [2.0, 0.0, 1.0], gamma=0.5)
    assert found.advantages.tolist() == [2.25, 0.5, 1.0]


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(-8, 8)), max_size=6), min_size=1, max_size=5))
def test_no_reward_per_token_is_lost(samples: list[list[tuple[bool, int]]]) -> None:
    tokens = [token for sample in samples for token in sample]
    rewards = [sum(reward for _, reward in sample) + 1.0 for sample in samples]
    mask, earned = [counts for counts, _ in tokens], [float(reward) for _, reward in tokens]
    found = token_rewards(rewards, [len(sample) for sample in samples], np.array(mask, dtype=bool), None, earned)
    assert not found[~np.array(mask, dtype=bool)].any()
    at = 0
    for sample, reward in zip(samples, rewards, strict=True):
        counts = any(counts for counts, _ in sample)
        assert found[at : at + len(sample)].sum() == (reward if counts else 0)
        at += len(sample)


def test_a_sample_without_tokens_in_the_mask_has_no_reward() -> None:
    assert token_rewards([5.0, 3.0, 4.0], [2, 0, 1], [False, False, True]).tolist() == [0.0, 0.0, 4.0]
    assert token_rewards([], [], []).tolist() == []


def test_a_coefficient_without_a_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_coef = 0\.5 needs the KL divergence"):
        token_rewards([1.0], [1], [True], kl_coef=0.5)
    with pytest.raises(ValueError, match=r"kl_coef = 0\.5 needs the KL divergence"):
        reinforce_plus_plus_baseline_advantages([1.0], [0], [0], [1], kl_coef=0.5)


def test_discounted_returns_by_hand() -> None:
    assert discounted_returns([1.0, 2.0, 4.0, 8.0], [3, 1], gamma=0.5).tolist() == [3.0, 4.0, 4.0, 8.0]
    assert discounted_returns([1.0, 2.0, 4.0], [3], gamma=0.0).tolist() == [1.0, 2.0, 4.0]
    assert discounted_returns([1.0, 2.0, 4.0], [3], gamma=1.0).tolist() == [7.0, 6.0, 4.0]
    skipping = discounted_returns([1.0, 9.0, 4.0], [3], [True, False, True], gamma=0.5)
    assert skipping.tolist() == [3.0, 0.0, 4.0]
    rows = discounted_returns([[1.0, 2.0], [4.0, 9.0]], mask=[[True, True], [True, False]], gamma=0.5)
    assert rows.tolist() == [[2.0, 2.0], [4.0, 0.0]]


def test_gae_by_hand() -> None:
    found = gae([0.0, 1.0], [0.5, 0.25], [2], gamma=0.5, lambd=0.5)
    # delta: 0 + 0.5 * 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75
    assert found.advantages.tolist() == [-0.375 + 0.25 * 0.75, 0.75]
    assert found.returns is not None
    assert found.returns.tolist() == [-0.1875 + 0.5, 1.0]
    one = gae([3.0], [1.0], [1])
    assert (one.advantages.tolist(), one.returns.tolist() if one.returns is not None else None) == ([2.0], [3.0])


def test_lambda_1_returns_the_discounted_return_and_lambda_0_the_error_of_one_step() -> None:
    draw = np.random.default_rng(0)
    rewards, values, lengths = draw.normal(size=9), draw.normal(size=9), [4, 5]
    assert gae(rewards, values, lengths, gamma=0.9).returns == pytest.approx(
        discounted_returns(rewards, lengths, gamma=0.9), abs=1e-12
    )
    following = np.append(values[1:], 0.0)
    following[3] = 0.0
    found = gae(rewards, values, lengths, gamma=0.9, lambd=0.0)
    assert found.advantages == pytest.approx(rewards + 0.9 * following - values, abs=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.0])
@pytest.mark.parametrize("lambd", [1.0, 0.95, 0.0])
def test_gae_is_that_of_a_loop_at_all_lengths(gamma: float, lambd: float) -> None:
    lengths = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7, 0, BLOCK, BLOCK + 1, 2 * BLOCK + 100, 3]
    draw, total = np.random.default_rng(1), sum(lengths)
    rewards, values, mask = draw.normal(size=total), draw.normal(size=total), draw.random(total) < 0.8
    for counted in (mask, np.ones(total, dtype=bool)):
        found = gae(rewards, values, lengths, counted, gamma=gamma, lambd=lambd)
        assert found.returns is not None
        starts = np.cumsum([0, *lengths])
        for start, end in itertools.pairwise(starts):
            own = slice(start, end)
            advantages, returns = looped(rewards[own], values[own], counted[own], gamma, lambd)
            np.testing.assert_allclose(found.advantages[own], advantages, rtol=0, atol=1e-11)
            np.testing.assert_allclose(found.returns[own], returns, rtol=0, atol=1e-11)


def test_rows_are_samples_of_one_length_and_float32_is_computed_in_float64() -> None:
    draw = np.random.default_rng(2)
    rewards, values = (draw.normal(size=(3, 50)).astype(np.float32) for _ in range(2))
    rows, packed = gae(rewards, values, lambd=0.9), gae(rewards.ravel(), values.ravel(), [50] * 3, lambd=0.9)
    assert rows.returns is not None
    assert (rows.advantages.dtype, rows.advantages.shape, rows.returns.shape) == (np.float64, (3, 50), (3, 50))
    assert rows.advantages.ravel().tolist() == packed.advantages.tolist()
    exact = gae(rewards.astype(np.float64), values.astype(np.float64), lambd=0.9)
    np.testing.assert_allclose(rows.advantages, exact.advantages, rtol=0, atol=1e-6)


def test_the_critic_has_a_lambda_of_its_own() -> None:
    draw = np.random.default_rng(3)
    rewards, values = draw.normal(size=7), draw.normal(size=7)
    both = gae(rewards, values, [7], gamma=0.9, lambd=0.5, critic_lambd=0.95)
    assert both.advantages.tolist() == gae(rewards, values, [7], gamma=0.9, lambd=0.5).advantages.tolist()
    assert both.returns == pytest.approx(gae(rewards, values, [7], gamma=0.9, lambd=0.95).returns, abs=1e-12)


def test_lambda_by_length() -> None:
    draw = np.random.default_rng(4)
    rewards, values, mask = draw.normal(size=8), draw.normal(size=8), np.array([False, *[True] * 7])
    found = gae(rewards, values, [5, 1, 2], mask, lambd=0.3, length_adaptive_alpha=0.5)
    by_sample = [gae(rewards[1:5], values[1:5], [4], lambd=0.5)]  # 1 - 1 / (0.5 * 4)
    by_sample += [gae(rewards[at:to], values[at:to], [to - at], lambd=0.0) for at, to in ((5, 6), (6, 8))]
    expected = [0.0, *(value for one in by_sample for value in one.advantages)]
    assert found.advantages == pytest.approx(expected, abs=1e-12)
    assert found.returns == pytest.approx(gae(rewards, values, [5, 1, 2], mask, lambd=0.3).returns, abs=1e-12)


def test_the_end_of_a_sample_hides_the_next_one() -> None:
    values, rewards = np.array([1.0, 2.0, math.nan]), np.array([1.0, 0.0, 5.0])
    found = gae(rewards, values, [2, 1])
    assert np.isfinite(found.advantages[:2]).all()
    assert np.isnan(found.advantages[2])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1.0, 2.0],), r"without lengths they are \[B, T\]"),
        (([1.0, 2.0], [1]), "lengths sum to 1, but there are 2 tokens"),
        (([1.0, 2.0], [2], [True]), r"mask has shape \(1,\), expected \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        discounted_returns(*arguments)
    with pytest.raises(ValueError, match=r"a column has shape \(1,\), expected \(2,\)"):
        gae([1.0, 2.0], [1.0], [2])


def test_reinforce_plus_plus_by_hand() -> None:
    trains, response = np.array([0, 1, 0, 1, 0, 0, 1]) > 0, np.array([0, 1, 1, 1, 1, 0, 1]) > 0
    kl = [9.0, 2.0, 9.0, 4.0, 9.0, 9.0, 0.0]
    found = reinforce_plus_plus_advantages([8.0, 3.0], [5, 2], trains, response, kl, kl_coef=0.5, gamma=0.5)
    # rewards per token -1, 0 (a tool's), -2 + 8, 0 (a tool's after the reward); and 3
    assert found.advantages.tolist() == [0.0, 0.5, 3.0, 6.0, 0.0, 0.0, 3.0]
    assert found.returns is not None
    assert found.returns.tolist() == found.advantages.tolist()
    skipping = reinforce_plus_plus_advantages([8.0, 3.0], [5, 2], trains, trains, kl, kl_coef=0.5, gamma=0.5)
    assert skipping.advantages.tolist() == [0.0, 2.0, 0.0, 6.0, 0.0, 0.0, 3.0]


def test_reinforce_plus_plus_without_trained_tokens_is_0_and_a_bad_reward_costs_its_sample() -> None:
    none, every = np.zeros(4, dtype=bool), np.ones(4, dtype=bool)
    assert reinforce_plus_plus_advantages([5.0, 1.0], [2, 2], none, every).advantages.tolist() == [0.0] * 4
    found = reinforce_plus_plus_advantages([math.nan, 1.0], [2, 2], every, every).advantages
    assert np.isnan(found[:2]).all()
    assert found[2:].tolist() == [1.0, 1.0]
    assert reinforce_plus_plus_advantages([], [], [], []).advantages.tolist() == []
    assert reinforce_plus_plus_advantages([3.0], [0], [], []).advantages.tolist() == []


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    found = reinforce_plus_plus_baseline_advantages(
        [1.0, 0.0, 5.0], [0, 0, 1], [0, 1, 2], [2, 1, 1], [1.0, -1.0, 0.0, 2.0], kl_coef=0.5
    )
    assert found.advantages.tolist() == [0.0, 1.0, -0.5, -1.0]
    keeping = {"normalize": True, "group_of_one": "reward"}
    kept: Any = reinforce_plus_plus_baseline_advantages([1.0, 0.0, 5.0], [0, 0, 1], [0, 1, 2], [2, 1, 1], **keeping)
    assert kept.advantages.tolist() == [0.5, 0.5, -0.5, 5.0]


def test_ppo_has_the_same_rewards_for_the_actor_and_the_critic() -> None:
    response, kl = np.array([False, True, True, True]), [9.0, 2.0, 0.0, 4.0]
    values = [7.0, 0.5, 0.25, 1.0]
    found = ppo_advantages([3.0], values, [4], response, kl, kl_coef=0.5, gamma=1.0, lambd=1.0)
    assert found.returns is not None
    assert found.returns.tolist() == [0.0, 0.0, 1.0, 1.0]  # -1 + 0 + (3 - 2), with the divergence
    assert found.advantages.tolist() == [0.0, -0.5, 0.75, 0.0]
    lost = ppo_advantages([math.inf, 1.0], [0.0, 0.0], [1, 1], [True, True])
    assert np.isnan(lost.advantages[0])
    assert lost.advantages[1] == 1.0


def test_returns_are_those_of_slime() -> None:
    expected = SLIME["returns"]
    found = reinforce_plus_plus_advantages(REWARDS, LENGTHS, TRAINS, EVERY, KL, kl_coef=KL_COEF, gamma=GAMMA)
    assert found.advantages == pytest.approx(expected["reinforce_plus_plus"], abs=1e-6)
    rollouts = np.arange(len(LENGTHS))
    centred = reinforce_plus_plus_baseline_advantages(REWARDS, GROUPS, rollouts, LENGTHS, KL, kl_coef=KL_COEF)
    assert centred.advantages == pytest.approx(expected["reinforce_plus_plus_baseline"], abs=1e-6)
    options = {"kl_coef": KL_COEF, "gamma": GAMMA, "lambd": LAMBD}
    of_ppo = ppo_advantages(REWARDS, PEER_VALUES, LENGTHS, EVERY, KL, **options)
    assert of_ppo.advantages == pytest.approx(expected["gae"]["advantages"], abs=1e-6)
    assert of_ppo.returns == pytest.approx(expected["gae"]["returns"], abs=1e-6)


def test_returns_are_those_of_verl_with_the_loss_mask() -> None:
    """verl skips tokens that do not train, and whitens. Its results at such tokens train nothing."""
    expected = VERL["returns"]
    found = reinforce_plus_plus_advantages(REWARDS, LENGTHS, TRAINS, TRAINS, KL, kl_coef=KL_COEF, gamma=GAMMA)
    plain, whitened = (
        np.array(expected["reinforce_plus_plus"]["returns"]),
        expected["reinforce_plus_plus"]["advantages"],
    )
    assert found.advantages[TRAINS] == pytest.approx(plain[TRAINS], abs=1e-6)
    assert whiten(found.advantages, TRAINS)[TRAINS] == pytest.approx(np.array(whitened)[TRAINS], abs=2e-6)
    options = {"kl_coef": KL_COEF, "gamma": GAMMA, "lambd": LAMBD}
    of_ppo = ppo_advantages(REWARDS, PEER_VALUES, LENGTHS, TRAINS, KL, **options)
    assert of_ppo.returns is not None
    goals, of_gae = np.array(expected["gae"]["returns"]), np.array(expected["gae"]["advantages"])
    assert of_ppo.returns[TRAINS] == pytest.approx(goals[TRAINS], abs=1e-6)
    assert whiten(of_ppo.advantages, TRAINS)[TRAINS] == pytest.approx(of_gae[TRAINS], abs=2e-6)


def test_lambdas_of_returns_and_by_length_are_those_of_nemo_rl() -> None:
    """NeMo-RL skips tokens that do not train; its results there train nothing."""
    options = {"gamma": GAMMA, "lambd": LAMBD, "critic_lambd": OF_RETURNS, "length_adaptive_alpha": BY_LENGTH}
    found = ppo_advantages(REWARDS, PEER_VALUES, LENGTHS, TRAINS, **options)
    expected = {name: np.array(values)[TRAINS] for name, values in NEMO_RL["gae"].items()}
    assert found.returns is not None
    assert found.advantages[TRAINS] == pytest.approx(expected["advantages"], abs=1e-6)
    assert found.returns[TRAINS] == pytest.approx(expected["returns"], abs=1e-6)


def test_columns_may_be_lists_and_tensors() -> None:
    expected = gae([1.0, 2.0, 3.0], [0.5, 0.25, 1.0], [2, 1], [True, True, False], lambd=0.5)
    columns = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0.5, 0.25, 1.0], dtype=torch.bfloat16)
    found = gae(*columns, torch.tensor([2, 1]), torch.tensor([1, 1, 0]), lambd=0.5)
    assert (found.advantages.dtype, found.advantages.tolist()) == (np.float64, expected.advantages.tolist())
    rewards, kl = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25, 1.0], requires_grad=True)
    of_tensors = token_rewards(rewards, [2, 1], [1, 1, 1], kl, kl_coef=1.0)
    assert of_tensors.tolist() == [-0.5, 0.75, 1.0]
    with pytest.raises(ValueError, match=r"kl has shape \(2,\), expected \(3,\)"):
        token_rewards(rewards, [2, 1], [1, 1, 1], [0.0, 0.0], kl_coef=1.0)
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), expected \(1,\)"):
        reinforce_plus_plus_advantages(rewards, [3], [1, 1, 1], [1, 1, 1])


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_an_infinite_reward_makes_tokens_of_its_sample_nan(gamma: float) -> None:
    found = discounted_returns([1.0, math.inf, 2.0], [2, 1], gamma=gamma)
    assert np.isnan(found[1])
    assert found[2] == 2.0
    assert not np.isinf(found).any()
