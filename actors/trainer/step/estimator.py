"""Advantages of a batch's tokens, by the estimator that the recipe names."""

import numpy as np
import structlog
from numpy.typing import NDArray

from actors.trainer.algorithms.group_baselines import (
    GroupOfOne,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from actors.trainer.algorithms.whitening import whiten
from actors.trainer.data.batch import TrainBatch
from runtime.settings.recipe import AlgorithmConfig, trains_demonstrations, uses_groups
from runtime.settings.topology import Topology

Floats = NDArray[np.float64]

log = structlog.get_logger()


def group_of_one(topology: Topology) -> GroupOfOne:
    """Return the advantage of a group with a single rollout: as set, or its reward if every group has one sample."""
    algorithm = topology.algorithm
    alone = topology.rollout.n_samples_per_prompt == 1 and uses_groups(algorithm)
    if algorithm.group_of_one == "reward" or not alone or trains_demonstrations(topology):
        return algorithm.group_of_one
    if not algorithm.disable_rewards_normalization:
        log.warning("rewards_not_normalized", reason="rollout.n_samples_per_prompt = 1: every advantage would be 0")
    return "reward"


def token_advantages(batch: TrainBatch, algorithm: AlgorithmConfig, alone: GroupOfOne) -> Floats:
    """Compute the advantage of each token, [N]. Every rank computes those of the whole batch.

    Args:
        batch: The whole batch.
        algorithm: Names the estimator.
        alone: Advantage of a group with a single rollout.
    """
    advantages_N = np.repeat(_sample_advantages(batch, algorithm, alone), batch.lengths_B)
    return whiten(advantages_N, batch.loss_mask_N != 0) if algorithm.normalize_advantages else advantages_N


def _sample_advantages(batch: TrainBatch, algorithm: AlgorithmConfig, alone: GroupOfOne) -> Floats:
    rewards_B, groups_B, rollouts_B = batch.rewards_B, batch.groups_B, batch.rollouts_B
    grouped = rewards_B, groups_B, rollouts_B
    normalize, std = not algorithm.disable_rewards_normalization, not algorithm.disable_grpo_std_normalization
    match algorithm.advantage_estimator:
        case "grpo" | "gspo" | "cispo":
            return grpo_advantages(*grouped, normalize=normalize, normalize_std=std, group_of_one=alone)
        case "reinforce_plus_plus_baseline":
            return grpo_advantages(*grouped, normalize=normalize, normalize_std=False, group_of_one=alone)
        case "rloo":
            return rloo_advantages(*grouped, group_of_one=alone)
        case "opo":
            return opo_advantages(*grouped, batch.mask_sums_B, group_of_one=alone)
        case "gpg":
            return gpg_advantages(*grouped, group_of_one=alone)
        case "maxrl":
            return maxrl_advantages(*grouped)
        case "grpo_passk":
            return passk_advantages(*grouped, normalize_std=std, group_of_one=alone)
        case "reinforce":
            return reinforce_advantages(rewards_B, rollouts_B, baseline=normalize)
