"""The table of estimators: it is complete, and its inputs are those of the functions."""

import inspect
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.step import estimator
from actors.trainer.step.estimator import ESTIMATORS, Estimate, advantage_inputs, token_advantages
from runtime.settings.reading.config import type_of
from runtime.settings.tables.estimators import Estimator
from tests.actors.trainer.tiny import REWARD_KEYS, random_batch
from tests.build.topology import algorithm_of, joined

BY_SAMPLE = ("rewards", "groups", "rollouts", "lengths", "baseline_rewards")


def test_every_estimator_of_the_settings_is_declared() -> None:
    assert {*ESTIMATORS, "custom"} == {type_of(table) for table in get_args(Estimator)}


@pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)
def test_its_inputs_are_arguments_in_order_and_its_options_keywords(estimate: Estimate) -> None:
    known = {field.name for field in fields(AdvantageInputs)} | {"mask_sums"}
    assert set(estimate.inputs) <= known
    parameters = inspect.signature(estimate.function).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    keywords = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert len(positional) == len(estimate.inputs)
    assert set(estimate.options) == keywords


@pytest.mark.parametrize("name", ESTIMATORS)
def test_samples_that_are_reordered_keep_their_advantages(name: str) -> None:
    """Groups form by id, wherever their samples are."""
    batch, algorithm = random_batch(), algorithm_of(estimator={"type": name})
    values = np.random.default_rng(1).normal(size=len(batch.tokens_N))
    inputs = advantage_inputs(batch, REWARD_KEYS, values=values)
    order = np.random.default_rng(0).permutation(len(batch.lengths_B))
    where = batch.tokens_of(order)
    moved = replace(
        inputs,
        **{part: getattr(inputs, part)[order] for part in BY_SAMPLE},
        named_rewards={key: rewards[order] for key, rewards in inputs.named_rewards.items()},
        **{part: getattr(inputs, part)[where] for part in ("loss_mask", "response_mask", "values")},
    )
    expected = token_advantages(inputs, algorithm, "zero").advantages
    np.testing.assert_allclose(token_advantages(moved, algorithm, "zero").advantages, expected[where], atol=1e-12)


def test_the_estimators_that_the_rules_allow_read_rewards_per_token() -> None:
    reads = {name for name, estimate in ESTIMATORS.items() if estimate.needs("rewards_per_token")}
    assert reads == {type_of(table) for table in get_args(Estimator) if table.of_tokens}


def test_the_response_begins_with_the_first_sampled_token() -> None:
    batch = random_batch()
    masked = batch.loss_mask_N.copy()
    masked[:] = 0
    found = advantage_inputs(replace(batch, loss_mask_N=masked)).response_mask
    for start, length in zip(batch.starts_B.tolist(), batch.lengths_B.tolist(), strict=True):
        sampled = np.flatnonzero(batch.staleness_N[start : start + length] >= 0)
        first = sampled[0] if len(sampled) else length
        assert found[start : start + length].tolist() == [place >= first for place in range(length)]


def test_a_missing_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_values = ESTIMATORS["rloo"]._replace(inputs=("rewards", "values"))
    monkeypatch.setattr(estimator, "ESTIMATORS", {"rloo": needs_values})
    with pytest.raises(ValueError, match='the estimator "rloo" needs values'):
        token_advantages(advantage_inputs(random_batch()), algorithm_of(estimator={"type": "rloo"}), "zero")


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
def test_returns_skip_tokens_that_do_not_train_if_the_recipe_says_so(name: str) -> None:
    """As verl does: the next token of a trained one is the next trained one."""
    batch = random_batch()
    inputs = advantage_inputs(batch, values=np.random.default_rng(1).normal(size=len(batch.tokens_N)))
    within = inputs.response_mask & ~inputs.loss_mask
    assert within.any()
    settings: dict[str, Any] = {"estimator": {"type": name, "gamma": 0.9}}
    counting = token_advantages(inputs, algorithm_of(**settings), "zero")
    skips = joined(settings, {"estimator": {"discount_tool_tokens": False}})
    skipping = token_advantages(inputs, algorithm_of(**skips), "zero")
    assert not np.allclose(counting.advantages[inputs.loss_mask], skipping.advantages[inputs.loss_mask])
    kept = inputs.loss_mask  # without those tokens there is nothing to skip
    lengths = np.add.reduceat(kept.astype(np.int64), batch.starts_B)
    columns = {part: getattr(inputs, part)[kept] for part in ("loss_mask", "response_mask", "values")}
    alone = token_advantages(replace(inputs, lengths=lengths, **columns), algorithm_of(**settings), "zero")
    np.testing.assert_allclose(skipping.advantages[kept], alone.advantages, atol=1e-12)
    assert not skipping.advantages[~kept].any()
