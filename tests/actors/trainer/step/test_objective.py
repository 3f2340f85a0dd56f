"""The terms of a recipe's loss are added with their weights, bit for bit as written out."""

from typing import Any

import pytest
import torch

from actors.trainer.step.objective import Objective
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.losses import PpoLoss
from tests.build.losses import inputs
from tests.build.topology import algorithm_of, joined

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
    [{}, {"kl": {"type": "k3", "loss_coef": 0.2}}, {"entropy_coef": 0.1, "loss": {"type": "ppo", "eps_clip_c": 3.0}}],
    ids=["policy", "divergence", "entropy"],
)
def test_grpo_is_the_clipped_loss_minus_entropy_plus_divergence(algorithm: dict[str, Any]) -> None:
    config, given = algorithm_of(**joined({"loss": {"type": "ppo", "eps_clip_high": 0.28}}, algorithm)), columns()
    loss, metrics = Objective(config)(inputs(**given), entropy_coef=config.entropy_coef)
    ratio = torch.exp(-(given["old"] - given["new"]))
    policy = torch.maximum(-ratio * given["advantages"], -ratio.clamp(0.8, 1.28) * given["advantages"])
    assert isinstance(config.loss, PpoLoss)
    if config.loss.eps_clip_c is not None:
        bound = torch.minimum(policy, -config.loss.eps_clip_c * given["advantages"])
        policy = torch.where(given["advantages"] < 0, bound, policy)
    expected = policy - config.entropy_coef * given["entropy"] if config.entropy_coef else policy
    if config.kl.loss_coef:
        difference = given["new"] - given["ref"]
        expected = expected + config.kl.loss_coef * (torch.exp(-difference) - 1 + difference)
    assert torch.equal(loss, expected)
    assert torch.equal(metrics["train/pg_loss"], policy)


def test_the_names_of_the_metrics_are_known_before_the_first_token() -> None:
    assert list(Objective(AlgorithmConfig()).names) == POLICY
    assert list(Objective(algorithm_of(kl={"type": "k1", "loss_coef": 0.1})).names) == [
        *POLICY,
        "train/kl_loss",
        "train/kl_clampfrac",
    ]
    assert list(Objective(algorithm_of(loss={"type": "sft"})).names) == [
        "train/loss",
        "train/sft_loss",
        "train/entropy_loss",
    ]


def test_metrics_have_no_gradient() -> None:
    new = torch.zeros(3, requires_grad=True)
    loss, metrics = Objective(AlgorithmConfig())(inputs(new), entropy_coef=0.0)
    assert loss.requires_grad
    assert not any(values.requires_grad for values in metrics.values())


def test_a_rejected_token_keeps_its_entropy_and_its_divergence() -> None:
    """The engine is far from all tokens, so that all are rejected."""
    config = algorithm_of(rs={"type": "ratio", "upper_bound": 1.1}, kl={"type": "k2", "loss_coef": 0.2})
    given = columns() | {"rollout": columns()["old"] - 3.0}
    loss, metrics = Objective(config)(inputs(**given), entropy_coef=0.1)
    divergence = (given["new"] - given["ref"]).square() / 2
    assert torch.equal(metrics["train/pg_loss"].abs(), torch.zeros(64))
    assert torch.equal(loss, metrics["train/pg_loss"] - 0.1 * given["entropy"] + 0.2 * divergence)


def test_weights_of_the_current_policy_need_no_old_log_probs() -> None:
    config = algorithm_of(bypass_mode=True, loss={"type": "gpg"}, tis={"type": "clip", "upper_bound": 1.5})
    given = columns()
    expected = torch.exp(given["new"] - given["rollout"]).clamp(0.0, 1.5) * -given["advantages"] * given["new"]
    for old in (given["old"], torch.full((64,), torch.nan)):
        loss, metrics = Objective(config)(inputs(**given | {"old": old}), entropy_coef=0.0)
        torch.testing.assert_close(loss, expected)
        assert "train/ois" not in metrics


def test_the_likelihood_of_good_samples_is_added_with_its_weight() -> None:
    given = columns()
    plain = Objective(AlgorithmConfig())(inputs(**given), entropy_coef=0.0).loss
    config = AlgorithmConfig(positive_example_nll_weight=0.5)
    rewards = torch.tensor([1.0, 0.0, -1.0, 0.1] * 16)
    loss, metrics = Objective(config)(inputs(**given, rewards=rewards), entropy_coef=0.0, positive_scale=2.0)
    expected = torch.where(rewards > 0, -2.0 * given["new"], 0.0)
    torch.testing.assert_close(loss, plain + 0.5 * expected)
    assert torch.equal(metrics["train/positive_nll_loss"], expected)


def test_the_mismatch_is_measured_with_the_trainers_log_probs_also_if_the_engines_are_the_old_ones() -> None:
    config, given = AlgorithmConfig(get_mismatch_metrics=True, use_rollout_logprobs=True), columns()
    metrics = Objective(config)(
        inputs(**given | {"old": given["rollout"]}, trainer=given["old"]), entropy_coef=0.0
    ).metrics
    assert torch.equal(metrics["train/mis_kl"], given["rollout"] - given["old"])
