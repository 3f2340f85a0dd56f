"""Estimators of the KL divergence: by hand, and their invariants."""

import math

import pytest
import torch

from actors.trainer.algorithms.kl import kl_clamped, kl_divergence
from tests.actors.trainer.algorithms.peers import SLIME, VERL, column


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


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_a_divergence_beyond_the_largest_log_ratio_has_a_finite_gradient(kind) -> None:
    new = torch.tensor([-150.0, 150.0, -0.5], requires_grad=True)
    divergence = kl_divergence(new, torch.zeros(3), kind, max_log_ratio=20.0)
    divergence.sum().backward()
    assert divergence.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 1.0 - math.exp(0.5)])


def test_k3_plus_has_the_value_of_verls_k3_and_the_gradient_of_k2() -> None:
    """exp(3) - 1 - 3 is above the limit of 10 nats, which the gradient does not have."""
    new = torch.tensor([-1.5, -0.2, -4.0], requires_grad=True)
    found = kl_divergence(new, torch.tensor([-1.0, -1.0, -1.0]), "k3+")
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-0.8) - 0.2, 10.0], rel=1e-6)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5, 0.8, -3.0])


def test_k1_plus_has_the_value_of_k1_and_the_gradient_of_k2() -> None:
    new = torch.tensor([-1.5, -0.2, -40.0], requires_grad=True)
    found = kl_divergence(new, torch.tensor([-1.0, -1.0, -1.0]), "k1+")
    found.sum().backward()
    assert found.tolist() == pytest.approx([-0.5, 0.8, -39.0])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5, 0.8, -39.0])  # of k1 it would be 1 everywhere


def test_the_gradient_of_k1_plus_is_that_of_the_divergence() -> None:
    """Over all tokens of a policy, by its logits; that of k1 alone has the mean 0."""
    logits, reference = torch.tensor([1.0, 0.2, -0.5], requires_grad=True), torch.tensor([0.3, 0.3, 0.4]).log()
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    policy = logits.softmax(0).detach()
    for estimator, expected in (("k1+", exact), ("k1", torch.zeros(3))):
        estimates = kl_divergence(logits.log_softmax(0), reference, estimator)
        found = torch.autograd.grad((policy * estimates).sum(), logits)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SLIME["kl"])
def test_estimators_are_those_of_slime(name: str) -> None:
    estimator, *unbiased = name.split()
    compared(estimator, SLIME["kl"][name], column("old") if unbiased else None)


@pytest.mark.parametrize("name", VERL["kl"])
def test_estimators_are_those_of_verl(name: str) -> None:
    compared(name, VERL["kl"][name], None)


def compared(estimator, peer: dict, old: torch.Tensor | None) -> None:
    new = column("new", gradient=True)
    found = kl_divergence(new, column("ref"), estimator, old_log_probs=old)
    found.sum().backward()
    assert found.sum().item() == pytest.approx(peer["loss"], rel=1e-6, abs=1e-6)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(peer["gradient"], rel=1e-6, abs=1e-6)


def test_the_ratio_to_the_old_policy_is_finite_at_any_log_ratio() -> None:
    new = torch.tensor([-91.0, -1.0], requires_grad=True)
    found = kl_divergence(new, torch.tensor([-1.0, -91.0]), "k3", old_log_probs=-92 - new.detach(), max_log_ratio=20.0)
    found.sum().backward()
    assert found.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()


def test_limited_estimates_are_counted() -> None:
    """exp(3) - 1 - 3 is above 10 nats, exp(2) - 1 - 2 is not."""
    new, ref = torch.tensor([-3.0, -2.0, -30.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])
    expected = {
        "k1": [0, 0, 0, 0],
        "k2": [0, 0, 0, 0],
        "k3": [0, 0, 1, 0],
        "k3+": [1, 0, 1, 0],
        "k1+": [0, 0, 0, 0],
        "low_var_kl": [1, 0, 1, 0],
    }
    for estimator, counts in expected.items():
        assert kl_clamped(new, ref, estimator, max_log_ratio=20.0).tolist() == counts  # type: ignore[arg-type]
