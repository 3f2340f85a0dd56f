"""Estimator, loss and correction: every allowed combination is computed, and what is refused; and the page of them."""

from typing import Final, get_args

import msgspec
import numpy as np
import pytest
import torch

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.step.estimator import token_advantages
from actors.trainer.step.objective import Objective, corrections
from runtime.settings.load import load_topology
from runtime.settings.reading.config import type_of
from runtime.settings.recipe import Recipe
from runtime.settings.reference.combinations import combinations_page
from runtime.settings.rules.algorithm import algorithm_problems, allows
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss, LossTable
from tests.build.advantages import advantage_inputs
from tests.build.losses import inputs
from tests.build.topology import algorithm_of, joined
from tests.grid.functions import NEEDED, types_of
from tests.runtime.settings.shipped import LAPTOP

RECIPE: Final[Recipe] = load_topology(LAPTOP, ()).topology
LENGTHS: Final = (3, 2, 4, 1, 2, 3)
ESTIMATORS = types_of(Estimator)
LOSSES = [table for table in get_args(Loss) if table.learns_from == "samples" and type_of(table) != "custom"]


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
def test_every_pair_is_computed(estimator: str) -> None:
    draw, given = np.random.default_rng(5), batch()
    new, old, rollout = (torch.from_numpy(-np.abs(draw.normal(size=sum(LENGTHS)))) for _ in range(3))
    for table in LOSSES:
        name = type_of(table)
        algorithm = algorithm_of(
            **joined({"estimator": {"type": estimator}, "loss": {"type": name}}, NEEDED.get(estimator, {}))
        )
        assert refused(algorithm) == {}
        advantages = torch.from_numpy(token_advantages(given, algorithm, "zero").advantages)
        policy = new.clone().requires_grad_()
        columns = inputs(policy, old, advantages, rollout=rollout, lengths=LENGTHS)
        loss = Objective(algorithm)(columns, entropy_coef=0.0).loss
        assert loss.dtype is torch.float64
        loss.sum().backward()
        assert policy.grad is not None
        assert policy.grad.isfinite().all()
        assert policy.grad.abs().sum() > 0, name


@pytest.mark.parametrize("table", LOSSES, ids=type_of)
def test_every_correction_of_a_loss_is_computed_or_refused(table: type[LossTable]) -> None:
    draw = np.random.default_rng(5)
    new, old, rollout, advantages = (torch.from_numpy(-np.abs(draw.normal(size=12))) for _ in range(4))
    given, loss = inputs(new.requires_grad_(), old, advantages, rollout=rollout, lengths=(4, 8)), type_of(table)
    for name, correction in {"tis": {"type": "clip"}, "rs": {"type": "ratio"}, "opsm_delta": 1e-4}.items():
        algorithm = algorithm_of(loss={"type": loss}, **{name: correction})
        problems = refused(algorithm)
        if allows(table, name):
            assert problems == {}
            (found,) = corrections(algorithm)
            expected = Objective(algorithm_of(loss={"type": loss}))(given, entropy_coef=0.0).loss
            total = Objective(algorithm)(given, entropy_coef=0.0).loss
            torch.testing.assert_close(total, expected * found(given).factors)
        else:
            key = "opsm_delta" if name == "opsm_delta" else f"{name}.type"
            assert f'has no effect with algorithm.loss.type = "{loss}"' in problems[f"algorithm.{key}"]


def test_the_page_says_what_the_classes_say() -> None:
    rows = [line.split(" | ") for line in combinations_page().splitlines() if line.startswith("| `")]
    answers = {row[0].strip("| `"): [cell.strip(" |") for cell in row[1:]] for row in rows}
    assert answers["prime_rl"] == ["no"] * 5
    assert answers["rloo"] == ["yes", "yes", "yes", "yes", "no"]
