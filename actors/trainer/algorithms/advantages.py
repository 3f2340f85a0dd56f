"""Advantages from rewards: the credit that a sample's tokens get. B samples."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STD_EPS: Final = 1e-6  # reward units


def grpo_advantages(
    rewards: Floats, groups: Ints, rollouts: Ints, *, normalize: bool = True, normalize_std: bool = True
) -> Floats:
    """Centre and scale rewards within each prompt group; every token of a sample gets its sample's value.

    Args:
        rewards: [B], reward units.
        groups: [B], the prompt group of each sample, in any order.
        rollouts: [B], equal for samples that are parts of one rollout: they have one vote together, their mean.
        normalize: off: the rewards themselves.
        normalize_std: off: centred only. Off by itself for a group of one rollout, whose advantage then is 0.

    Returns:
        Advantages, [B].

    Source:
        DeepSeekMath, arXiv 2402.03300, outcome supervision. The standard deviation, left open there, divides by
        G - 1, as torch.std does by default and slime does.
    """
    if not normalize:
        return rewards.astype(np.float64)
    _, group_of = np.unique(groups, return_inverse=True)
    _, rollout_of = np.unique(rollouts, return_inverse=True)
    pairs, vote_of = np.unique(group_of * (rollout_of.max() + 1) + rollout_of, return_inverse=True)
    votes = np.bincount(vote_of, weights=rewards) / np.bincount(vote_of)
    voters = pairs // (rollout_of.max() + 1)  # the group of each vote
    counts = np.bincount(voters)
    centred = rewards - (np.bincount(voters, weights=votes) / counts)[group_of]
    if not normalize_std:
        return centred
    votes -= (np.bincount(voters, weights=votes) / counts)[voters]
    std = np.sqrt(np.bincount(voters, weights=votes**2) / np.maximum(counts - 1, 1))
    return np.where(counts > 1, 1.0 / (std + STD_EPS), 1.0)[group_of] * centred
