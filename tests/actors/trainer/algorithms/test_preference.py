"""Losses of preference pairs: by hand, their edges, and their gradients."""

import math
from typing import Any

import pytest
import torch

from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
from actors.trainer.algorithms.preference import dpo_loss, rm_loss
from tests.actors.trainer.algorithms.peers import NEMO_RL

# Two pairs: tokens of the sequences 0 (chosen) and 1 (rejected), 2 (chosen) and 3 (rejected).
NUMBERS = torch.tensor([0, 0, 1, 2, 3, 3, 3])
SIGNS = torch.tensor([1, 1, -1, 1, -1, -1, -1], dtype=torch.float64)
NEW = torch.tensor([-1.0, -2.0, -1.5, -0.5, -1.0, -1.0, -4.0], dtype=torch.float64)
REF = torch.tensor([-1.5, -2.5, -1.0, -1.5, -2.0, -1.0, -3.0], dtype=torch.float64)
MARGINS = ((0.5 + 0.5) - (-0.5), 1.0 - (1.0 + 0.0 - 1.0))  # 1.5 and 1.0
AVERAGES = (0.5 - (-0.5), 1.0 - 0.0)


def pairs(new: torch.Tensor = NEW, signs: torch.Tensor = SIGNS) -> LossInputs:
    none = torch.zeros_like(new)
    return LossInputs(
        log_probs=new,
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=REF.to(new.dtype),
        advantages=signs,
        entropy=none,
        sequences=Sequences(NUMBERS, 4),
        rollouts=Sequences(NUMBERS // 2, 2),
    )


def of_pairs(values: torch.Tensor) -> list[float]:
    return [values[0].item(), values[3].item()]


def spread(per_pair: list[float]) -> list[float]:
    return [per_pair[number // 2] for number in NUMBERS.tolist()]


def test_dpo_by_hand() -> None:
    loss, metrics = dpo_loss(pairs(), beta=0.4, label_smoothing=0.1)
    expected = [0.9 * math.log1p(math.exp(-0.4 * h)) + 0.1 * math.log1p(math.exp(0.4 * h)) for h in MARGINS]
    assert loss.tolist() == pytest.approx(spread(expected), abs=1e-12)
    assert of_pairs(metrics["train/rewards_chosen"]) == pytest.approx([0.4, 0.4], abs=1e-12)
    assert of_pairs(metrics["train/rewards_rejected"]) == pytest.approx([-0.2, 0.0], abs=1e-12)
    assert of_pairs(metrics["train/rewards_margins"]) == pytest.approx([0.6, 0.4], abs=1e-12)
    assert of_pairs(metrics["train/rewards_accuracies"]) == [1.0, 1.0]


def test_ipo_by_hand() -> None:
    loss, _ = dpo_loss(pairs(), beta=0.2, kind="ipo")
    assert of_pairs(loss) == pytest.approx([(h - 2.5) ** 2 for h in AVERAGES], abs=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_gradient_is_that_of_the_loss(kind: Any) -> None:
    new = NEW.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda values: dpo_loss(pairs(values), label_smoothing=0.2, kind=kind).loss, (new,))


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_a_pair_without_tokens_of_one_response_has_no_loss_and_no_gradient(kind: Any) -> None:
    new, signs = NEW.clone().requires_grad_(), SIGNS.clone()
    signs[2] = 1.0
    loss, metrics = dpo_loss(pairs(new, signs), kind=kind)
    loss.sum().backward()
    assert new.grad is not None
    assert loss.tolist()[:3] == new.grad.tolist()[:3] == [0.0, 0.0, 0.0]
    assert loss[3] > 0
    assert all(values[0] == 0 for values in metrics.values())


@pytest.mark.parametrize("distance", [90.0, -90.0])
def test_large_log_ratios_are_finite(distance: float) -> None:
    new = (NEW + distance * SIGNS).float().requires_grad_()
    loss, metrics = dpo_loss(pairs(new, SIGNS.float()), beta=10.0)
    loss.sum().backward()
    assert new.grad is not None
    assert loss.isfinite().all()
    assert new.grad.isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())


def test_no_tokens_at_all() -> None:
    none, sequences = torch.empty(0), Sequences(torch.empty(0, dtype=torch.int64), 1)
    inputs = LossInputs(
        log_probs=none,
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=none,
        advantages=none,
        entropy=none,
        sequences=sequences,
        rollouts=sequences,
    )
    assert dpo_loss(inputs).loss.shape == (0,)


# Two pairs of a reward model, whose responses stand anywhere.
PAIRS = Sequences(torch.tensor([0, 1, 1, 0]), 2)
RM_SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
REWARDS = torch.tensor([0.5, 2.0, -1.0, -0.75], dtype=torch.float64)  # margins 1.25 and -3


def test_the_loss_of_a_reward_model_by_hand() -> None:
    loss, metrics = rm_loss(REWARDS, RM_SIGNS, PAIRS, label_smoothing=0.1)
    first, second = (0.9 * math.log1p(math.exp(-h)) + 0.1 * math.log1p(math.exp(h)) for h in (1.25, -3.0))
    assert loss.tolist() == pytest.approx([first, second, second, first], abs=1e-12)
    assert {name.removeprefix("train/rewards_"): values.tolist()[:2] for name, values in metrics.items()} == {
        "chosen": [0.5, -1.0],
        "rejected": [-0.75, 2.0],
        "margins": [1.25, -3.0],
        "accuracies": [1.0, 0.0],
    }


def test_the_loss_of_a_reward_model_is_that_of_nemo_rl() -> None:
    expected = NEMO_RL["preference"]
    scores = torch.tensor(NEMO_RL["scores"], requires_grad=True)
    numbers = torch.arange(len(scores))
    loss, metrics = rm_loss(scores, (numbers % 2 == 0) * 2.0 - 1.0, Sequences(numbers // 2, 3))
    (gradient,) = torch.autograd.grad(loss.mean(), scores)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), rtol=1e-6, atol=1e-7)
    found = {"loss": loss, "accuracy": metrics["train/rewards_accuracies"]}
    found |= {f"rewards_{kind}_mean": metrics[f"train/rewards_{kind}"] for kind in ("chosen", "rejected")}
    for name, values in found.items():
        assert values.mean().item() == pytest.approx(expected[name], rel=1e-6), name


def test_the_gradient_of_a_reward_model_is_that_of_its_loss() -> None:
    new = REWARDS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda values: rm_loss(values, RM_SIGNS, PAIRS, label_smoothing=0.2).loss, (new,))


@pytest.mark.parametrize("distance", [90.0, -90.0])
def test_distant_rewards_have_a_finite_loss_and_gradient(distance: float) -> None:
    new = (distance * RM_SIGNS).requires_grad_()
    loss, metrics = rm_loss(new, RM_SIGNS, PAIRS)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert loss.tolist() == pytest.approx([0.0] * 4 if distance > 0 else [180.0] * 4)
    assert all(values.isfinite().all() for values in metrics.values())


def test_half_a_pair_has_no_loss_and_equal_rewards_are_wrong() -> None:
    new = torch.tensor([2.0, 1.0, 1.0], requires_grad=True)
    loss, metrics = rm_loss(new, torch.tensor([1.0, 1.0, -1.0]), Sequences(torch.tensor([0, 1, 1]), 2))
    loss.sum().backward()
    assert new.grad is not None
    assert (loss[0].item(), new.grad[0].item()) == (0.0, 0.0)
    assert all(values[0] == 0 for values in metrics.values())
    assert loss[1].item() == pytest.approx(math.log(2))
    assert metrics["train/rewards_accuracies"].tolist() == [0.0, 0.0, 0.0]


def test_a_constant_in_all_rewards_changes_nothing_and_no_response_has_no_loss() -> None:
    loss, metrics = rm_loss(REWARDS + 4.0, RM_SIGNS, PAIRS)
    torch.testing.assert_close(loss, rm_loss(REWARDS, RM_SIGNS, PAIRS).loss, rtol=0, atol=1e-12)
    assert metrics["train/rewards_margins"].tolist() == [1.25, -3.0, -3.0, 1.25]
    none = torch.empty(0)
    assert rm_loss(none, none, Sequences(torch.empty(0, dtype=torch.int64), 1)).loss.shape == (0,)
