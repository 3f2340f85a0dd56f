"""Penalties on rewards by the length of a response, before an estimator reads them. B is the number of samples.

Example:
    ```python
    from actors.trainer.algorithms.length_penalties import overlong_penalties

    found = overlong_penalties([80, 95, 100], max_response_len=100, buffer_len=20, factor=0.5)
    assert found.tolist() == [0.0, -0.375, -0.5]
    ```
"""

import numpy as np
from numpy.typing import ArrayLike

from actors.trainer.algorithms.arguments import Floats, floats, group_numbers
from actors.trainer.algorithms.group_baselines import usable_rewards


def overlong_penalties(
    response_lens: ArrayLike, *, max_response_len: int, buffer_len: int, factor: float = 1.0
) -> Floats:
    """DAPO's overlong penalty: a reward falls linearly in the last tokens that a response may have.

    min(-(length - (max_response_len - buffer_len)) / buffer_len factor, 0).

    Args:
        response_lens: [B], integers, tokens of each response.
        max_response_len: Length at which the penalty is `factor`, in tokens.
        buffer_len: Length of the zone before it in which rewards fall, in tokens, at least 1.
        factor: Penalty at max_response_len, in reward units.

    Returns:
        Penalties to add to the rewards, [B], float64: 0 or negative.

    Edges:
        No clamp: beyond max_response_len the penalty falls below -factor, as in verl. An empty response: 0, unless the
        zone is longer than max_response_len.

    Raises:
        ValueError: buffer_len is below 1.

    Source:
        DAPO, arXiv 2503.14476, soft overlong punishment; the paper gives -1 beyond the maximum.
    """
    if buffer_len < 1:
        raise ValueError(f"buffer_len is {buffer_len}, expected at least 1")
    excess = floats("response_lens", response_lens) - (max_response_len - buffer_len)
    return np.minimum(-excess / buffer_len * factor, 0.0) + 0.0  # + 0.0: -0.0 is 0.0


def linear_length_penalties(
    rewards: ArrayLike,
    groups: ArrayLike,
    rollouts: ArrayLike | None = None,
    *,
    output_lens: ArrayLike,
    input_lens: ArrayLike,
    num_turns: ArrayLike,
    num_output_tokens_weight: float = 0.25,
    num_input_tokens_weight: float = 0.1,
    num_turns_weight: float = 0.1,
) -> Floats:
    """prime-rl's length penalty: a share of the group's mean reward, by tokens and turns.

    -mean (w_output output / max(output) + w_input input / max(input) + w_turns turns / max(turns)), with mean and
    maxima over the rollouts of the group. A maximum of 0 counts as 1.

    Args:
        rewards: [B], reward units.
        groups: [B], integers or texts, prompt groups.
        rollouts: [B], integers or texts, equal for the parts of one rollout. Its parts are added up, and each part gets
            the penalty. None: no sample has parts.
        output_lens: [B], integers, sampled tokens.
        input_lens: [B], integers, other tokens: prompt and tool output.
        num_turns: [B], integers, turns.
        num_output_tokens_weight: Share for the longest output.
        num_input_tokens_weight: Share for the longest input.
        num_turns_weight: Share for the most turns.

    Returns:
        Penalties to add to the rewards, [B], float64.

    Edges:
        Positive where the group's mean reward is negative, as in prime-rl; 0 where it has no usable reward. Excluded
        rewards count in no mean, and their lengths in the maxima. A group of one loses the whole share.

    Source:
        prime-rl, its algorithm "grpo" with the linear length penalty.
    """
    rewards = floats("rewards", rewards)
    usable, num_samples = usable_rewards(rewards), len(rewards)
    group_of = group_numbers("groups", groups, num_samples)
    rollout_of = group_numbers("rollouts", np.arange(num_samples) if rollouts is None else rollouts, num_samples)
    size, num_groups = rollout_of.max(initial=0) + 1, group_of.max(initial=-1) + 1
    votes, vote_of = np.unique(group_of * size + rollout_of, return_inverse=True)
    voters = votes // size
    counts = np.bincount(vote_of, weights=usable)
    means = np.bincount(vote_of, weights=np.where(usable, rewards, 0.0)) / np.maximum(counts, 1)
    is_cast = np.bincount(voters, weights=counts > 0, minlength=num_groups)
    pass_rates = np.bincount(voters, weights=means, minlength=num_groups) / np.maximum(is_cast, 1)
    shares = np.zeros(len(votes))
    for name, sizes, weight in (
        ("output_lens", output_lens, num_output_tokens_weight),
        ("input_lens", input_lens, num_input_tokens_weight),
        ("num_turns", num_turns, num_turns_weight),
    ):
        of_votes = np.bincount(vote_of, weights=floats(name, sizes, num_samples))
        largest = np.ones(num_groups)
        np.maximum.at(largest, voters, of_votes)
        shares += weight * of_votes / largest[voters]
    return -(pass_rates[voters] * shares)[vote_of]
