"""The critic's loss and the explained variance: by hand, at the edges, and as in verl and slime."""

import math

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.values import explained_variance, value_loss
from tests.actors.trainer.algorithms.peers import LENGTHS, SLIME, VERL, column


def values(*numbers: float, gradient: bool = False) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=gradient)


def test_the_loss_by_hand() -> None:
    new = values(1.0, 0.5, -0.5, 2.0, gradient=True)
    loss, metrics = value_loss(new, values(1.0, 0.0, 0.0, 2.0), values(3.0, 0.75, 0.0, 2.0), value_clip=0.25)
    # unclipped 4, 0.0625, 0.25, 0; clipped at 1, 0.25, -0.25, 2: 4, 0.25, 0.0625, 0
    assert loss.tolist() == pytest.approx([4.0, 0.25, 0.25, 0.0], abs=1e-12)
    assert metrics["train/value_clipfrac"].tolist() == [0.0, 1.0, 1.0, 0.0]
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-4.0, 0.0, -1.0, 0.0], abs=1e-12)


def test_without_a_clip_it_is_the_squared_error_times_its_factor() -> None:
    loss, metrics = value_loss(values(3.0), values(0.0), values(1.0), value_clip=None, value_loss_coef=0.5)
    assert (loss.tolist(), metrics["train/value_clipfrac"].tolist()) == ([2.0], [0.0])


def test_no_token_has_no_loss_and_nan_stays_nan() -> None:
    assert value_loss(values(), values(), values()).loss.shape == (0,)
    nan = values(math.nan, 1.0, 1.0), values(0.0, math.nan, 0.0), values(0.0, 0.0, math.nan)
    assert value_loss(*nan).loss.isnan().all()


def test_the_gradient_is_that_of_the_loss() -> None:
    new = values(0.3, -0.4, 0.9, gradient=True)
    old, goal = values(0.25, 0.1, 0.2), values(1.0, -1.0, 0.0)
    assert torch.autograd.gradcheck(lambda new: value_loss(new, old, goal).loss, (new,))


@pytest.mark.parametrize("peer", ["verl", "slime"])
def test_the_loss_is_that_of_peers(peer: str) -> None:
    new = column("new", gradient=True)
    loss, metrics = value_loss(new, column("old"), column("ref"), value_loss_coef=0.5 if peer == "verl" else 1.0)
    expected = (VERL if peer == "verl" else SLIME)["value_loss"]
    sums = [one.mean() if peer == "verl" else one.sum() for one in loss.split(LENGTHS)]
    total = torch.stack(sums).mean() if peer == "verl" else torch.stack(sums).sum()
    assert total.item() == pytest.approx(expected["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), rtol=1e-6, atol=1e-6)
    if peer == "slime":
        assert metrics["train/value_clipfrac"].sum().item() == expected["clipped"]


def test_explained_variance_by_hand() -> None:
    returns, mask = np.array([1.0, 2.0, 3.0, 100.0]), np.array([True, True, True, False])
    assert explained_variance(np.array([1.0, 2.0, 3.0, 0.0]), returns, mask) == 1.0
    assert explained_variance(np.array([2.0, 2.0, 2.0, 0.0]), returns, mask) == pytest.approx(0.0, abs=1e-4)
    assert explained_variance(np.array([1.5, 2.0, 2.5, 0.0]), returns, mask) == pytest.approx(1 - 0.25 / 1.00001)
    assert explained_variance(-returns, returns, mask) == pytest.approx(1 - 4 / 1.00001)


def test_explained_variance_of_large_equal_or_missing_returns() -> None:
    offset = np.full(3, 1e6)
    assert explained_variance(
        offset + np.array([0.1, 0.0, 0.3]), offset + np.array([0.1, 0.2, 0.3]), np.ones(3, bool)
    ) == pytest.approx(1 - (0.04 / 3) / 0.01001, rel=1e-6)
    assert explained_variance(np.zeros(3), np.full(3, 0.7), np.ones(3, bool)) == 1.0
    assert explained_variance(np.array([0.5]), np.array([1.0]), np.ones(1, bool)) == 0.0
    assert explained_variance(np.zeros(2), np.array([math.nan, 1.0]), np.ones(2, bool)) == 0.0
