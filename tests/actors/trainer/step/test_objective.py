"""The terms of a recipe's loss are added with their weights, bit for bit as written out."""

from typing import Any

import pytest
import torch

from actors.trainer.step.objective import Objective
from runtime.settings.recipe import AlgorithmConfig
from tests.build.losses import inputs

POLICY = ["train/loss", "train/pg_loss", "train/entropy_loss", "train/pg_clipfrac", "train/ppo_kl"]
POLICY.append("train/ratio_clampfrac")


def columns(count: int = 64) -> dict[str, torch.Tensor]:
    """Random columns in float32; ratios are often beyond the clips."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(6, count, generator=generator)
    new, old, rollout, ref = (-(row.abs() * 0.7) for row in drawn[:4])
    return {"new": new, "old": old, "rollout": rollout, "ref": ref, "advantages": drawn[4], "entropy": drawn[5].abs()}


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"kl_loss_coef": 0.2, "kl_loss_type": "k3"}, {"entropy_coef": 0.1, "eps_clip_c": 3.0}],
    ids=["policy", "divergence", "entropy"],
)
def test_grpo_is_the_clipped_loss_minus_entropy_plus_divergence(algorithm: dict[str, Any]) -> None:
    config, given = AlgorithmConfig(eps_clip_high=0.28, **algorithm), columns()
    loss, metrics = Objective(config)(inputs(**given), entropy_coef=config.entropy_coef)
    ratio = torch.exp(-(given["old"] - given["new"]))
    policy = torch.maximum(-ratio * given["advantages"], -ratio.clamp(0.8, 1.28) * given["advantages"])
    if config.eps_clip_c is not None:
        bound = torch.minimum(policy, -config.eps_clip_c * given["advantages"])
        policy = torch.where(given["advantages"] < 0, bound, policy)
    expected = policy - config.entropy_coef * given["entropy"] if config.entropy_coef else policy
    if config.kl_loss_coef:
        difference = given["new"] - given["ref"]
        expected = expected + config.kl_loss_coef * (torch.exp(-difference) - 1 + difference)
    assert torch.equal(loss, expected)
    assert torch.equal(metrics["train/pg_loss"], policy)


def test_the_names_of_the_metrics_are_known_before_the_first_token() -> None:
    assert list(Objective(AlgorithmConfig()).names) == POLICY
    assert list(Objective(AlgorithmConfig(kl_loss_coef=0.1)).names) == [*POLICY, "train/kl_loss"]
    assert list(Objective(AlgorithmConfig(loss_type="sft_loss")).names) == [
        "train/loss",
        "train/sft_loss",
        "train/entropy_loss",
    ]


def test_metrics_have_no_gradient() -> None:
    new = torch.zeros(3, requires_grad=True)
    loss, metrics = Objective(AlgorithmConfig())(inputs(new), entropy_coef=0.0)
    assert loss.requires_grad
    assert not any(values.requires_grad for values in metrics.values())
