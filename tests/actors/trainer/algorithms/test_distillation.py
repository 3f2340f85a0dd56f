"""Distillation: by hand, against slime's and NeMo-RL's functions, and at the edges."""

import math

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.distillation import opd_advantages, topk_distillation_loss
from tests.actors.trainer.algorithms.peers import NEMO_RL, SLIME, column

TRAINS = np.array([True, True, False])


def test_the_reverse_kl_lowers_the_advantage_by_hand() -> None:
    found = opd_advantages(
        np.array([1.0, 1.0, 1.0]), np.array([-0.5, -2.0, -1.0]), np.array([-1.0, -1.0, -9.0]), TRAINS, opd_kl_coef=0.5
    )
    np.testing.assert_allclose(found, [0.75, 1.5, 1.0], rtol=0, atol=1e-12)


def test_a_teacher_equal_to_the_policy_changes_nothing() -> None:
    log_probs = np.array([-0.1, -0.7, -90.0], dtype=np.float32)
    assert opd_advantages(np.zeros(3), log_probs, log_probs, TRAINS).tolist() == [0.0, 0.0, 0.0]


def test_large_differences_are_not_clamped_and_tokens_without_loss_are_not_read() -> None:
    found = opd_advantages(np.zeros(3), np.array([-90.0, 0.0, np.nan]), np.array([0.0, -90.0, -np.inf]), TRAINS)
    assert found.tolist() == [90.0, -90.0, 0.0]
    assert opd_advantages(np.empty(0), np.empty(0), np.empty(0), np.empty(0, dtype=bool)).tolist() == []


@pytest.mark.parametrize("coef", ["0.5", "1.0"])
def test_advantages_agree_with_slimes(coef: str) -> None:
    given = [column(name).numpy() for name in ("advantages", "new", "ref")]
    found = opd_advantages(*given, np.ones(len(given[0]), dtype=bool), opd_kl_coef=float(coef))
    np.testing.assert_allclose(found, SLIME["opd"][coef], rtol=0, atol=1e-6)


P, Q = (0.5, 0.3), (0.2, 0.6)  # of the teacher and of the policy, over 2 of 3 tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.6)),
        ({"kl_type": "reverse"}, 0.2 * math.log(0.2 / 0.5) + 0.6 * math.log(0.6 / 0.3)),
        ({"kl_type": "mixed", "mixed_kl_weight": 0.25}, 0.25 * 0.250201 + 0.75 * 0.232630),
        (
            {"kl_type": "reverse", "zero_outside_topk": True},
            0.2 * math.log(0.2 / 0.5) + 0.6 * math.log(0.6 / 0.3) + 0.2 * (math.log(0.2) + 100),
        ),
    ],
)
def test_divergences_over_the_teachers_likeliest_tokens_by_hand(options: dict, expected: float) -> None:
    teacher, policy = (torch.tensor([row], dtype=torch.float64).log() for row in (P, Q))
    entropy = -sum(p * math.log(p) for p in (*Q, 0.2))
    loss, metrics = topk_distillation_loss(policy, teacher, torch.tensor([entropy], dtype=torch.float64), **options)
    assert loss.item() == pytest.approx(expected, abs=1e-6 if "mixed_kl_weight" in options else 1e-12)
    assert metrics["train/distillation_kl"].item() == loss.item()


@pytest.mark.parametrize("name", list(NEMO_RL["distillation"]))
def test_divergences_agree_with_those_of_nemo_rl(name: str) -> None:
    kind, _, outside = name.partition(" ")
    policy = torch.tensor(NEMO_RL["topk"]["policy"], requires_grad=True)
    teacher, entropy = (torch.tensor(NEMO_RL["topk"][key]) for key in ("teacher", "entropy"))
    loss, _ = topk_distillation_loss(
        policy, teacher, entropy, kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=bool(outside)
    )
    peer = NEMO_RL["distillation"][name]
    assert loss.mean().item() == pytest.approx(peer["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(loss.mean(), policy)
    np.testing.assert_allclose(gradient.numpy(), peer["gradient"], rtol=1e-5, atol=1e-7)


def test_gradients_are_those_of_finite_differences() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, dtype=torch.float64, generator=draw, requires_grad=True)
    teacher = torch.randn(4, 5, dtype=torch.float64, generator=draw).log_softmax(-1)[:, :3]

    def loss(logits: torch.Tensor, kind: str) -> torch.Tensor:
        spread = logits.log_softmax(-1)
        entropy = -(spread.exp() * spread).sum(-1)
        return topk_distillation_loss(spread[:, :3], teacher, entropy, kl_type=kind, zero_outside_topk=True).loss

    for kind in ("forward", "reverse", "mixed"):
        assert torch.autograd.gradcheck(lambda given, kind=kind: loss(given, kind), logits)


def test_tokens_that_the_teacher_rules_out_add_nothing_to_forward() -> None:
    teacher = torch.tensor([[0.0, -math.inf]])
    policy = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = topk_distillation_loss(policy, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), policy)
    assert loss.item() == 1.0
    assert gradient.tolist() == [[-1.0, 0.0]]
    assert topk_distillation_loss(policy, teacher, kl_type="reverse").loss.item() == math.inf
    assert topk_distillation_loss(torch.empty(0, 4), torch.empty(0, 4)).loss.shape == (0,)


def test_the_rest_needs_an_entropy() -> None:
    with pytest.raises(ValueError, match="needs the entropy"):
        topk_distillation_loss(torch.zeros(1, 2), torch.zeros(1, 2), kl_type="reverse", zero_outside_topk=True)
