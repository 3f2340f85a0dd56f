"""GRPO advantages from rewards. B is the number of samples."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STD_EPS: Final = 1e-6  # reward units


def grpo_advantages(
    rewards: Floats, groups: Ints, rollouts: Ints, *, normalize: bool = True, normalize_std: bool = True
) -> Floats:
    """Centre and scale rewards within each prompt group. Every token of a sample gets the sample's advantage.

    (reward - mean) / (std + 1e-6), with mean and standard deviation over the group's rollouts.

    Args:
        rewards: [B], reward units. Rewards that are not finite in float32 are excluded.
        groups: [B], the prompt group of each sample, in any order.
        rollouts: [B], equal for samples that are parts of one rollout. Such parts count once, with their mean reward.
        normalize: Centre the rewards. False returns the rewards themselves.
        normalize_std: Divide the centred rewards by the group's standard deviation. A group with a single rollout is
            not divided, and its advantage is 0.

    Returns:
        Advantages, [B]: exactly 0 where a group's rewards are equal, NaN for excluded rewards.

    Source:
        DeepSeekMath, arXiv 2402.03300, outcome supervision. The paper leaves the standard deviation open. Here it
        divides by G - 1, like the default of torch.std and like slime.
    """
    with np.errstate(over="ignore"):
        usable = np.isfinite(rewards.astype(np.float32))
    if not normalize:
        return np.where(usable, rewards, np.nan)
    _, group_of = np.unique(groups, return_inverse=True)
    _, rollout_of = np.unique(rollouts, return_inverse=True)
    pairs, vote_of = np.unique(group_of * (rollout_of.max() + 1) + rollout_of, return_inverse=True)
    voters = pairs // (rollout_of.max() + 1)  # prompt group of each rollout
    lowest = np.full(group_of.max() + 1, np.inf)
    np.minimum.at(lowest, group_of[usable], rewards[usable])
    # Subtracting the minimum gives equal rewards an advantage of exactly 0: in floats the mean of three 0.1 is not 0.1.
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
