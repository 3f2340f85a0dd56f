"""Policy losses: by hand, and their invariants."""

import math

import pytest
import torch

from actors.trainer.algorithms.policy_losses import ppo_loss
from tests.build.losses import inputs


def loss_of(log_prob: float, old: float, advantage: float, **options: float) -> tuple[float, float, float]:
    loss, metrics = ppo_loss(inputs([log_prob], [old], [advantage]), **options)
    return loss.item(), metrics["train/pg_clipfrac"].item(), metrics["train/ppo_kl"].item()


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
    ppo_loss(inputs(log_probs, [0, 0], [1, 1]), eps_clip=0.2).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])


@pytest.mark.parametrize("ratio", [-150.0, 150.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_beyond_the_largest_log_ratio_the_loss_and_its_gradient_are_finite(advantage: float, ratio: float) -> None:
    """exp(20) is 4.9e8; without the bound exp(150) is infinite in float32 and 0 * inf is no number."""
    new = torch.tensor([ratio, 0.0], requires_grad=True)
    loss = ppo_loss(inputs(new, [0, 0], [advantage] * 2), eps_clip=0.2, max_log_ratio=20.0).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -advantage]
