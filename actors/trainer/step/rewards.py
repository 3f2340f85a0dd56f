"""Rewards as the estimator reads them: the graders' rewards, lowered by the penalties of the recipe."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.trainer.algorithms.group_baselines import usable_rewards
from actors.trainer.algorithms.length_penalties import linear_length_penalties, overlong_penalties
from actors.trainer.data.batch import TrainBatch
from runtime.settings.derived import reward_keys
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import AlgorithmConfig, LinearPenalty


def with_penalties(batch: TrainBatch, recipe: Recipe) -> TrainBatch:
    """Return the batch with its penalties added to the rewards. The raw rewards stay."""
    algorithm, rewards_B, baselines_B = recipe.algorithm, batch.rewards_B, batch.baseline_rewards_B
    if algorithm.length_penalty is not None:
        rewards_B = rewards_B + _linear(batch, algorithm.length_penalty)
    if algorithm.overlong_buffer_len is not None:
        overlong = partial(
            overlong_penalties,
            max_response_len=recipe.rollout.max_response_len,
            buffer_len=algorithm.overlong_buffer_len,
            factor=algorithm.overlong_penalty_factor,
        )
        assert batch.response_lens_B is not None
        rewards_B = rewards_B + overlong(batch.response_lens_B)
        if baselines_B is not None and batch.baseline_lens_B is not None:
            baselines_B = baselines_B + overlong(batch.baseline_lens_B)
    return replace(batch, rewards_B=rewards_B, baseline_rewards_B=baselines_B)


def _linear(batch: TrainBatch, penalty: LinearPenalty) -> NDArray[np.float64]:
    assert batch.output_lens_B is not None
    assert batch.input_lens_B is not None
    assert batch.num_turns_B is not None
    return linear_length_penalties(
        batch.rewards_B,
        batch.groups_B,
        batch.rollouts_B,
        output_lens=batch.output_lens_B,
        input_lens=batch.input_lens_B,
        num_turns=batch.num_turns_B,
        **msgspec.structs.asdict(penalty),
    )


def reward_metrics(batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Mean of the penalized rewards, of the greedy samples' rewards, and statistics of each named reward.

    Rewards that are not finite in float32 are left out: their samples are masked.
    """
    usable = batch.rewards_B[usable_rewards(batch.rewards_B)]
    mean = {"rollout/rewards": float(usable.mean()) if len(usable) else 0.0}
    return mean | dict(_baselines(batch)) | dict(_named(batch, algorithm))


def _baselines(batch: TrainBatch) -> Iterator[tuple[str, float]]:
    if batch.baseline_rewards_B is None:
        return
    _, firsts = np.unique(batch.groups_B, return_index=True)
    greedy = batch.baseline_rewards_B[firsts]
    known = greedy[~np.isnan(greedy)]
    if len(known):
        yield "rollout/baseline_reward", float(known.mean())


def _named(batch: TrainBatch, algorithm: AlgorithmConfig) -> Iterator[tuple[str, float]]:
    keys = reward_keys(algorithm)
    if not keys or batch.named_rewards_B is None:
        return
    for key, rewards_B in zip(keys, batch.named_rewards_B.T, strict=True):
        known = rewards_B[~np.isnan(rewards_B)]
        if len(known):
            yield f"rollout/rewards/{key}/mean", float(known.mean())
            yield f"rollout/rewards/{key}/std", float(known.std())
            yield f"rollout/rewards/{key}/max", float(known.max())
            yield f"rollout/rewards/{key}/min", float(known.min())
