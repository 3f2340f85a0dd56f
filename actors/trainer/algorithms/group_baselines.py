"""Advantages with a baseline of the prompt group or the batch. B is the number of samples.

Every function works on the whole batch: groups and rollouts form by id, wherever their samples are. The parts of one
rollout count once, with their mean reward. Rewards that are not finite in float32 are excluded: they count nowhere, and
their advantage is NaN. Every token of a sample gets the sample's advantage. Whether tokens train changes nothing, but
for OPO's lengths. Without `rollouts` every sample is a rollout. No samples: an empty array. Columns are lists, numpy
arrays or torch tensors; one of another length raises a ValueError, and so does an unknown name of a choice.

Example:
    ```python
    import numpy as np

    from actors.trainer.algorithms.group_baselines import grpo_advantages, rloo_advantages

    rewards, groups = np.array([1.0, 5.0, 0.0, 5.0]), np.array([7, 8, 7, 8])  # two groups of two samples
    assert np.allclose(grpo_advantages(rewards, groups), [0.5**0.5, 0.0, -(0.5**0.5), 0.0], atol=1e-5)
    assert np.allclose(rloo_advantages(rewards, groups), [1.0, 0.0, -1.0, 0.0])
    parts = np.array([0, 1, 0, 2])  # samples 0 and 2 are parts of one rollout, alone in its group
    assert rloo_advantages(rewards, groups, parts).tolist() == [0.0, 0.0, 0.0, 0.0]
    ```
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.trainer.algorithms.arguments import Floats, check_choice, floats, group_numbers

Ints = NDArray[np.int64]
GroupOfOne = Literal["zero", "reward"]  # advantage of a rollout without others in its group

STD_EPS: Final = 1e-6  # reward units
NO_SPREAD: Final = 1e-9  # of the largest distance from the mean: a smaller deviation of rollouts is rounding


@dataclass(frozen=True)
class _Votes:
    """Rewards as votes of rollouts, V in number, in G groups.

    Rewards are raised by their group's lowest: then equal rewards have an advantage of exactly 0. In floats the mean of
    three 0.1 is not 0.1.
    """

    usable: NDArray[np.bool_]  # [B], the reward counts
    group_of: Ints  # [B]
    vote_of: Ints  # [B], rollout
    voters: Ints  # [V], group of each rollout
    lowest: Floats  # [G], infinite in a group without a usable reward
    raised: Floats  # [B], reward minus its group's lowest; 0 if it is not usable
    votes: Floats  # [V], mean raised reward
    is_cast: NDArray[np.bool_]  # [V], the rollout has a usable reward
    counts: Floats  # [G], rollouts with a usable reward
    means: Floats  # [G], of the votes

    @property
    def centred(self) -> Floats:
        """Reward minus its group's mean, [B]; NaN for excluded rewards."""
        return np.where(self.usable, self.raised - self.means[self.group_of], np.nan)

    @property
    def std(self) -> Floats:
        """Standard deviation of each group's votes with n - 1, [G]; 0 for a group of one."""
        deviations = np.where(self.is_cast, self.votes - self.means[self.voters], 0.0)
        return np.sqrt(np.bincount(self.voters, weights=deviations**2) / np.maximum(self.counts - 1, 1))

    @property
    def has_spread(self) -> NDArray[np.bool_]:
        """Whether the rollouts of a group differ, [G]. Without parts, they do if any rewards differ."""
        most = np.zeros(len(self.means))
        np.maximum.at(most, self.group_of[self.usable], np.abs(self.raised - self.means[self.group_of])[self.usable])
        return self.std > NO_SPREAD * most

    def alone(self, rewards: Floats, advantages: Floats, group_of_one: GroupOfOne) -> Floats:
        """Replace the advantages of groups of one rollout, [B]."""
        check_choice("group_of_one", group_of_one, GroupOfOne)
        lone = self.usable & (self.counts[self.group_of] == 1)
        return np.where(lone, rewards if group_of_one == "reward" else 0.0, advantages)


def usable_rewards(rewards: ArrayLike) -> NDArray[np.bool_]:
    """Return which rewards count: those that are finite in float32, |reward| <= 3.4e38.

    Args:
        rewards: [B], reward units.

    Returns:
        [B], bool.

    Edges:
        NaN, infinite values and numbers beyond float32 are excluded.

    Source:
        Rewards are stored and trained with in float32. The rule is ours.
    """
    with np.errstate(over="ignore"):
        return np.isfinite(floats("rewards", rewards).astype(np.float32))


def _votes(rewards: Floats, groups: ArrayLike, rollouts: ArrayLike | None) -> _Votes:
    usable, num_samples = usable_rewards(rewards), len(rewards)
    group_of = group_numbers("groups", groups, num_samples)
    rollout_of = group_numbers("rollouts", np.arange(num_samples) if rollouts is None else rollouts, num_samples)
    size = rollout_of.max(initial=0) + 1
    pairs, vote_of = np.unique(group_of * size + rollout_of, return_inverse=True)
    voters = pairs // size
    lowest = np.full(group_of.max(initial=-1) + 1, np.inf)
    np.minimum.at(lowest, group_of[usable], rewards[usable])
    raised = np.subtract(rewards, lowest[group_of], out=np.zeros(len(rewards)), where=usable)
    num_parts = np.bincount(vote_of, weights=usable)
    votes, is_cast = np.bincount(vote_of, weights=raised) / np.maximum(num_parts, 1), num_parts > 0
    counts = np.bincount(voters, weights=is_cast).astype(np.float64)
    means = np.bincount(voters, weights=votes) / np.maximum(counts, 1)
    return _Votes(usable, group_of, vote_of, voters, lowest, raised, votes, is_cast, counts, means)


def grpo_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    rollouts: ArrayLike | None = None,
    *,
    normalize: bool = True,
    normalize_std: bool = True,
    group_of_one: GroupOfOne = "zero",
) -> Floats:
    """GRPO: centre and scale rewards within each prompt group.

    Mean and standard deviation are over the group's rollouts.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, the prompt group of each sample, in any order.
        rollouts: [B], integers or texts, equal for samples that are parts of one rollout. None: no sample has parts.
        normalize: Centre the rewards. False returns the rewards themselves.
        normalize_std: Divide the centred rewards by the group's standard deviation. False: Dr. GRPO.
        group_of_one: Advantage of a group with a single rollout: 0, or its reward.

    Returns:
        Advantages, [B], float64: exactly 0 where a group's rewards are equal.

    Edges:
        No spread: exactly 0. With the standard deviation, that holds also for parts that differ in rollouts of equal
        mean. A group of one: `group_of_one`. With normalize = False neither applies.

    Source:
        DeepSeekMath, arXiv 2402.03300, outcome supervision. The paper leaves the standard deviation open. Here it
        divides by G - 1, like the default of torch.std and like slime. Without it: Dr. GRPO, arXiv 2503.20783.
    """
    rewards = floats("rewards", rewards)
    if not normalize:
        return np.where(usable_rewards(rewards), rewards, np.nan)
    votes = _votes(rewards, groups, rollouts)
    centred = votes.centred
    if normalize_std:
        scaled = np.where(votes.has_spread, 1.0 / (votes.std + STD_EPS), 0.0)
        centred = np.where(votes.counts > 1, scaled, 1.0)[votes.group_of] * centred
    return votes.alone(rewards, centred, group_of_one)


def rloo_advantages(
    rewards: ArrayLike, groups: ArrayLike, rollouts: ArrayLike | None = None, *, group_of_one: GroupOfOne = "zero"
) -> Floats:
    """RLOO: subtract the mean reward of the group's other rollouts.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups, in any order.
        rollouts: [B], integers or texts, equal for the parts of one rollout.
        group_of_one: Advantage of a group with a single rollout: 0 (verl's vectorised variant), or its reward (verl).

    Returns:
        Advantages, [B], float64: exactly 0 where a group's rewards are equal.

    Edges:
        No spread: exactly 0. A group of one: `group_of_one`.

    Source:
        Back to Basics, arXiv 2402.14740.
    """
    rewards = floats("rewards", rewards)
    votes = _votes(rewards, groups, rollouts)
    factors = votes.counts / np.maximum(votes.counts - 1, 1)
    return votes.alone(rewards, factors[votes.group_of] * votes.centred, group_of_one)


def opo_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    rollouts: ArrayLike | None,
    lengths: ArrayLike,
    *,
    group_of_one: GroupOfOne = "zero",
) -> Floats:
    """OPO: subtract the group's mean reward, weighted by the lengths of the rollouts.

    reward - sum(length reward) / sum(length).

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups, in any order.
        rollouts: [B], integers or texts, equal for the parts of one rollout, whose lengths are added.
        lengths: [B], integers, trained tokens of each sample.
        group_of_one: Advantage of a group with a single rollout: 0, or its reward (verl).

    Returns:
        Advantages, [B], float64: exactly 0 where a group's rewards are equal.

    Edges:
        No spread: exactly 0. A group of one: `group_of_one`. A group without trained tokens has the plain mean.

    Source:
        On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    """
    rewards = floats("rewards", rewards)
    votes = _votes(rewards, groups, rollouts)
    weights = np.bincount(votes.vote_of, weights=np.where(votes.usable, floats("lengths", lengths, len(rewards)), 0))
    totals = np.bincount(votes.voters, weights=weights)
    sums = np.bincount(votes.voters, weights=weights * votes.votes)
    baselines = np.where(totals > 0, sums / np.maximum(totals, 1), votes.means)
    advantages = np.where(votes.usable, votes.raised - baselines[votes.group_of], np.nan)
    return votes.alone(rewards, advantages, group_of_one)


def gpg_advantages(
    rewards: ArrayLike, groups: ArrayLike, rollouts: ArrayLike | None = None, *, group_of_one: GroupOfOne = "zero"
) -> Floats:
    """GPG: centre rewards within each group, and scale them by the share of rewards that are not 0 in the batch.

    The scale, alpha, counts rollouts of the batch.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups, in any order.
        rollouts: [B], integers or texts, equal for the parts of one rollout.
        group_of_one: Advantage of a group with a single rollout: 0, or alpha times its reward (verl).

    Returns:
        Advantages, [B], float64: exactly 0 where a group's rewards are equal.

    Edges:
        No spread: exactly 0. A group of one: `group_of_one`. alpha is the number of rollouts if all rewards are 0.

    Source:
        GPG, arXiv 2504.02546; alpha and its bound as in verl.
    """
    rewards = floats("rewards", rewards)
    votes = _votes(rewards, groups, rollouts)
    is_zero = votes.votes + np.where(np.isfinite(votes.lowest), votes.lowest, 0.0)[votes.voters] == 0
    alpha = votes.is_cast.sum() / max(int((votes.is_cast & ~is_zero).sum()), 1)
    return votes.alone(alpha * rewards, alpha * votes.centred, group_of_one)


def maxrl_advantages(rewards: ArrayLike, groups: ArrayLike, rollouts: ArrayLike | None = None) -> Floats:
    """MaxRL: centre rewards within each group and divide them by the group's mean.

    Rewards should not be negative.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups, in any order.
        rollouts: [B], integers or texts, equal for the parts of one rollout.

    Returns:
        Advantages, [B], float64: exactly 0 where a group's rewards are equal or their mean is not positive.

    Edges:
        No spread, a group of one, or a mean of 0 or less: exactly 0.

    Source:
        Maximum likelihood reinforcement learning, arXiv 2602.02710; a mean of 0 or less as in prime-rl.
    """
    rewards = floats("rewards", rewards)
    votes = _votes(rewards, groups, rollouts)
    means = np.where(np.isfinite(votes.lowest), votes.lowest, 0.0) + votes.means
    divides = (means > 0) & (votes.counts > 1)
    divisors = np.where(divides, means, np.inf)[votes.group_of]
    return votes.centred / divisors


def passk_advantages(
    rewards: ArrayLike,
    groups: ArrayLike,
    rollouts: ArrayLike | None = None,
    *,
    normalize_std: bool = True,
    group_of_one: GroupOfOne = "zero",
) -> Floats:
    """GRPO for pass@k: only the best rollout of a group has an advantage, its distance from the second best.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups, in any order.
        rollouts: [B], integers or texts, equal for the parts of one rollout.
        normalize_std: Divide by the standard deviation of the group's rollouts.
        group_of_one: Advantage of a group with a single rollout: 0, or its reward.

    Returns:
        Advantages, [B], float64: exactly 0 where the two best rewards of a group are equal.

    Edges:
        Equal best rewards or no spread: exactly 0. A group of one: `group_of_one`; verl raises.

    Source:
        Optimizing language models for inference time objectives, arXiv 2503.19595, as in verl.
    """
    rewards = floats("rewards", rewards)
    votes = _votes(rewards, groups, rollouts)
    cast = np.flatnonzero(votes.is_cast)
    order = cast[np.lexsort((votes.votes[cast], votes.voters[cast]))]  # rising within each group
    best = np.flatnonzero(np.diff(votes.voters[order], append=-1))  # the last place of each group
    found = np.zeros(len(votes.votes))
    several = best[votes.counts[votes.voters[order[best]]] > 1]
    found[order[several]] = votes.votes[order[several]] - votes.votes[order[several - 1]]
    if normalize_std:
        found /= votes.std[votes.voters] + STD_EPS
    advantages = np.where(votes.usable, found[votes.vote_of], np.nan)
    return votes.alone(rewards, advantages, group_of_one)


def reinforce_advantages(rewards: ArrayLike, rollouts: ArrayLike | None = None, *, normalize: bool = True) -> Floats:
    """REINFORCE: subtract the mean reward of the batch, or nothing.

    Args:
        rewards: [B], reward units.
        rollouts: [B], integers or texts, equal for the parts of one rollout.
        normalize: Subtract the mean over the batch's rollouts. False returns the rewards themselves.

    Returns:
        Advantages, [B], float64: exactly 0 where all rewards are equal and the mean is subtracted.

    Edges:
        One rollout: 0 where the mean is subtracted, else its reward.

    Source:
        Williams, Simple statistical gradient-following algorithms, 1992.
    """
    groups = np.zeros(len(floats("rewards", rewards)), dtype=np.int64)
    return grpo_advantages(rewards, groups, rollouts, normalize=normalize, normalize_std=False)


def gdpo_advantages(
    named_rewards: Mapping[str, ArrayLike],
    groups: ArrayLike,
    rollouts: ArrayLike | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    normalize_std: bool = True,
    group_of_one: GroupOfOne = "zero",
) -> Floats:
    """GDPO: normalize each of several rewards within its group, and add them up with weights.

    The caller whitens the sum over the tokens of the batch.

    Args:
        named_rewards: [B] each, reward units, by name.
        groups: [B], integers or texts, prompt groups.
        rollouts: [B], integers or texts, equal for the parts of one rollout. None: no sample has parts.
        weights: Weight of each reward, by name. A reward without a weight has weight 1.
        normalize_std: Divide each centred reward by its standard deviation in the group.
        group_of_one: Advantage of a group with a single rollout: 0, or its weighted rewards.

    Returns:
        Advantages, [B], float64: exactly 0 where all rewards of a group are equal.

    Edges:
        A sample of which any reward is excluded has NaN, and counts under no name. A group of one: `group_of_one`.

    Raises:
        ValueError: There are no rewards, they differ in length, or a weight has no reward.

    Source:
        GDPO, arXiv 2601.05242; the standard deviation divides by G - 1, as in verl.
    """
    if not named_rewards:
        raise ValueError("named_rewards is empty: GDPO needs at least one reward")
    columns = {name: floats(f"named_rewards[{name!r}]", rewards) for name, rewards in named_rewards.items()}
    if len({len(rewards) for rewards in columns.values()}) > 1:
        raise ValueError(f"named_rewards differ in length: { {name: len(column) for name, column in columns.items()} }")
    if unknown := sorted(set(weights or {}) - set(columns)):
        raise ValueError(f"weights names {unknown}, which named_rewards has not; it has {sorted(columns)}")
    usable = np.logical_and.reduce([usable_rewards(rewards) for rewards in columns.values()])
    advantages = np.zeros(len(usable))
    for name, rewards in columns.items():
        counted = np.where(usable, rewards, np.nan)
        normalized = grpo_advantages(counted, groups, rollouts, normalize_std=normalize_std, group_of_one=group_of_one)
        advantages += (weights or {}).get(name, 1.0) * normalized
    return advantages


def remax_advantages(rewards: ArrayLike, baseline_rewards: ArrayLike) -> Floats:
    """ReMax: subtract the reward of the greedy sample of the same prompt.

    Args:
        rewards: [B], reward units.
        baseline_rewards: [B], reward of the greedy sample of each sample's group.

    Returns:
        Advantages, [B], float64: exactly 0 where both rewards are equal.

    Edges:
        NaN where one of the two is excluded. There is no group statistic, so a group of one is like any other.

    Source:
        ReMax, arXiv 2310.10505, with one reward at the end of the response.
    """
    rewards = floats("rewards", rewards)
    baselines = floats("baseline_rewards", baseline_rewards, len(rewards))
    usable = usable_rewards(rewards) & usable_rewards(baselines)
    return np.where(usable, rewards - np.where(usable, baselines, 0.0), np.nan)
