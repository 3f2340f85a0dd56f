"""Losses of preference pairs: by hand, their edges, and their gradients."""

import math
from typing import Any

import pytest
import torch

from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
from actors.trainer.algorithms.preference import dpo_loss

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
