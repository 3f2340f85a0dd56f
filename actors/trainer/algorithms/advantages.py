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
    advantages = np.empty(len(rewards))
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, bounds):
        advantages[members] = _normalized(rewards[members], rollouts[members], normalize_std)
    return advantages


def _normalized(rewards: Floats, rollouts: Ints, normalize_std: bool) -> Floats:
    _, inverse, counts = np.unique(rollouts, return_inverse=True, return_counts=True)
    votes = np.bincount(inverse, weights=rewards) / counts
    centred = rewards - votes.mean()
    if not normalize_std or len(votes) < 2:
        return centred
    return centred / (votes.std(ddof=1) + STD_EPS)
