"""Estimator and loss: every allowed pair is computed, every other is refused with its reason; and the page of them."""

from typing import Final, get_args

import msgspec
import numpy as np
import pytest
import torch

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.step.estimator import token_advantages
from actors.trainer.step.objective import Objective, corrections
from runtime.settings.load import load_topology
from runtime.settings.recipe import Recipe
from runtime.settings.reference.combinations import combinations_page
from runtime.settings.rules.algorithm import APPLIES, REFUSALS, algorithm_problems, refusal
from runtime.settings.tables.algorithm import AlgorithmConfig, Estimator, LossMode
from tests.build.advantages import advantage_inputs
from tests.build.losses import inputs
from tests.grid.functions import NEEDED
from tests.runtime.settings.shipped import LAPTOP

RECIPE: Final[Recipe] = load_topology(LAPTOP, ()).topology
LENGTHS: Final = (3, 2, 4, 1, 2, 3)
ESTIMATORS, LOSSES = get_args(Estimator), get_args(LossMode)


def refused(algorithm: AlgorithmConfig) -> dict[str, str]:
    """What --check says about these settings of [algorithm], by key."""
    recipe = msgspec.structs.replace(RECIPE, algorithm=algorithm)
    return {problem.key: problem.message for problem in algorithm_problems(recipe)}


def batch() -> AdvantageInputs:
    """Two groups of three samples, with every column that an estimator may read."""
    draw, total = np.random.default_rng(3), sum(LENGTHS)
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 0.25, 1.0])
    named = {name: draw.random(len(LENGTHS)) for name in ("correct", "format")}
    tokens = {name: draw.normal(size=total) for name in ("kl", "values", "old_log_probs", "ref_log_probs")}
    groups = np.array([0, 1, 0, 1, 0, 1])
    return advantage_inputs(
        LENGTHS, rewards=rewards, groups=groups, named_rewards=named, baseline_rewards=rewards[::-1].copy(), **tokens
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_pair_is_computed_or_refused(estimator: Estimator) -> None:
    draw, given = np.random.default_rng(5), batch()
    new, old, rollout = (torch.from_numpy(-np.abs(draw.normal(size=sum(LENGTHS)))) for _ in range(3))
    for loss_mode in LOSSES:
        algorithm = AlgorithmConfig(advantage_estimator=estimator, loss_mode=loss_mode, **NEEDED.get(estimator, {}))
        problems, reason = refused(algorithm), refusal(estimator, loss_mode)
        assert problems == ({"algorithm.loss_mode": problems["algorithm.loss_mode"]} if reason else {}), loss_mode
        assert reason in problems.get("algorithm.loss_mode", "")
        if reason:
            continue
        advantages = torch.from_numpy(token_advantages(given, algorithm, "zero").advantages)
        policy = new.clone().requires_grad_()
        columns = inputs(policy, old, advantages, rollout=rollout, lengths=LENGTHS)
        loss = Objective(algorithm)(columns, entropy_coef=0.0).loss
        assert loss.dtype is torch.float64
        loss.sum().backward()
        assert policy.grad is not None
        assert policy.grad.isfinite().all()
        assert policy.grad.abs().sum() > 0, loss_mode


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_every_correction_of_a_loss_is_computed_or_refused(loss_mode: LossMode) -> None:
    draw = np.random.default_rng(5)
    new, old, rollout, advantages = (torch.from_numpy(-np.abs(draw.normal(size=12))) for _ in range(4))
    given = inputs(new.requires_grad_(), old, advantages, rollout=rollout, lengths=(4, 8))
    for name in ("use_tis", "use_rs", "use_opsm"):
        algorithm = AlgorithmConfig(loss_mode=loss_mode, **{name: True})
        problems = refused(algorithm)
        if loss_mode in APPLIES[name].choices:
            assert problems == {}
            (correction,) = corrections(algorithm)
            expected = Objective(AlgorithmConfig(loss_mode=loss_mode))(given, entropy_coef=0.0).loss
            loss = Objective(algorithm)(given, entropy_coef=0.0).loss
            torch.testing.assert_close(loss, expected * correction(given).factors)
        else:
            assert "has no effect with algorithm.loss_mode" in problems[f"algorithm.{name}"]


def test_the_page_says_what_the_declaration_says() -> None:
    page = combinations_page()
    for item in REFUSALS:
        assert f" It {item.reason}." in page
    row = next(line for line in page.splitlines() if line.startswith("| `gspo` | "))
    assert row.count("yes") == 1
    row = next(line for line in page.splitlines() if line.startswith("| `grpo` | "))
    assert row.count("yes") == len(LOSSES)
