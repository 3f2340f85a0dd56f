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
        rewards: [B], reward units; one that float32 cannot hold is no vote.
        groups: [B], the prompt group of each sample, in any order.
        rollouts: [B], equal for samples that are parts of one rollout: they have one vote together, their mean.
        normalize: off: the rewards themselves.
        normalize_std: off: centred only. Off by itself for a group of one rollout, whose advantage then is 0.

    Returns:
        Advantages, [B], exactly 0 where a group's rewards are equal; NaN for a reward that is no vote.

    Source:
        DeepSeekMath, arXiv 2402.03300, outcome supervision. The standard deviation, left open there, divides by
        G - 1, as torch.std does by default and slime does.
    """
    with np.errstate(over="ignore"):
        usable = np.isfinite(rewards.astype(np.float32))
    if not normalize:
        return np.where(usable, rewards, np.nan)
    _, group_of = np.unique(groups, return_inverse=True)
    _, rollout_of = np.unique(rollouts, return_inverse=True)
    pairs, vote_of = np.unique(group_of * (rollout_of.max() + 1) + rollout_of, return_inverse=True)
    voters = pairs // (rollout_of.max() + 1)  # the group of each vote
    lowest = np.full(group_of.max() + 1, np.inf)
    np.minimum.at(lowest, group_of[usable], rewards[usable])
    # equal rewards become 0 here, to the bit: the mean of three times 0.1 is not 0.1
    raised = np.subtract(rewards, lowest[group_of], out=np.zeros(len(rewards)), where=usable)
    num_parts = np.bincount(vote_of, weights=usable)
    votes, is_cast = np.bincount(vote_of, weights=raised) / np.maximum(num_parts, 1), num_parts > 0
    counts = np.bincount(voters, weights=is_cast)
    means = np.bincount(voters, weights=votes) / np.maximum(counts, 1)
    centred = np.where(usable, raised - means[group_of], np.nan)
    if not normalize_std:
        return centred
    deviations = np.where(is_cast, votes - means[voters], 0.0)
    std = np.sqrt(np.bincount(voters, weights=deviations**2) / np.maximum(counts - 1, 1))
    return np.where(counts > 1, 1.0 / (std + STD_EPS), 1.0)[group_of] * centred
