"""Advantages, losses and reductions: by hand, against numpy written from the formulae, and their invariants."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms.advantages import grpo_advantages
from actors.trainer.algorithms.losses import kl_divergence, policy_loss, reduction

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


def loss_of(log_prob: float, old: float, advantage: float, **options: float) -> tuple[float, float, float]:
    tensors = [torch.tensor([value], dtype=torch.float64) for value in (log_prob, old, advantage)]
    return tuple(value.item() for value in policy_loss(*tensors, **options))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.0 * 1.28, 1.0),  # a good token counts up to 1 + eps_clip_high
        (0.5, 2.0, -1.0, 0.0),  # and has no lower bound
        (0.5, -2.0, 2.0 * 0.8, 1.0),  # a bad one counts down to 1 - eps_clip
        (1.5, -2.0, 3.0, 0.0),  # and has no upper bound
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, expected: float, clipped: float) -> None:
    loss, was_clipped, ppo_kl = loss_of(math.log(ratio) - 1, -1, advantage, eps_clip=0.2, eps_clip_high=0.28)
    assert (loss, was_clipped, ppo_kl) == pytest.approx((expected, clipped, -math.log(ratio)))


def test_the_upper_clip_is_the_lower_one_unless_set() -> None:
    assert loss_of(math.log(1.5), 0, 1, eps_clip=0.2)[0] == pytest.approx(-1.2)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_leaves_good_ones() -> None:
    assert loss_of(math.log(9.0), 0, -1, eps_clip=0.2)[0] == pytest.approx(9.0)
    assert loss_of(math.log(9.0), 0, -1, eps_clip=0.2, eps_clip_c=3.0)[0] == pytest.approx(3.0)
    assert loss_of(math.log(0.1), 0, 1, eps_clip=0.2, eps_clip_c=3.0)[0] == pytest.approx(-0.1)


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = torch.tensor([0.5, 0.1], requires_grad=True)
    policy_loss(log_probs, torch.zeros(2), torch.ones(2), eps_clip=0.2).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5), ("low_var_kl", math.exp(0.5) - 1.5)],
)
def test_kl_estimators_by_hand(estimator: str, expected: float) -> None:
    value = kl_divergence(torch.tensor([-1.5]), torch.tensor([-1.0]), estimator)  # type: ignore[arg-type]
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_low_variance_kl_is_limited() -> None:
    assert kl_divergence(torch.tensor([-9.0]), torch.tensor([0.0]), "low_var_kl").item() == 10.0


def test_k3_is_unbiased_for_the_divergence() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum().item()
    for estimator in ("k1", "k3"):
        expectation = (policy * kl_divergence(policy.log(), reference.log(), estimator)).sum().item()
        assert expectation == pytest.approx(exact, rel=1e-5)


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


@pytest.mark.parametrize("ratio", [-150.0, 150.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_beyond_the_largest_log_ratio_the_loss_and_its_gradient_are_finite(advantage: float, ratio: float) -> None:
    """exp(20) is 4.9e8; without the bound exp(150) is infinite in float32 and 0 * inf is no number."""
    new = torch.tensor([ratio, 0.0], requires_grad=True)
    loss = policy_loss(new, torch.zeros(2), torch.full((2,), advantage), eps_clip=0.2, max_log_ratio=20.0).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -advantage]


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_a_divergence_beyond_the_largest_log_ratio_has_a_finite_gradient(kind) -> None:
    new = torch.tensor([-150.0, 150.0, -0.5], requires_grad=True)
    divergence = kl_divergence(new, torch.zeros(3), kind, max_log_ratio=20.0)
    divergence.sum().backward()
    assert divergence.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 1.0 - math.exp(0.5)])


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
