"""What an estimator of advantages gets and returns: columns of one whole batch. B samples, N tokens of all samples.

Example:
    ```python
    import numpy as np

    from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
    from actors.trainer.algorithms.group_baselines import opo_advantages

    inputs = AdvantageInputs(
        rewards=np.array([1.0, 0.0]),
        groups=np.array([0, 0]),
        rollouts=np.array([0, 1]),
        lengths=np.array([3, 2]),  # tokens of prompt and response
        loss_mask=np.array([False, True, True, False, True]),
        response_mask=np.array([False, True, True, False, True]),
    )
    assert inputs.mask_sums.tolist() == [2, 1]
    found = opo_advantages(inputs.rewards, inputs.groups, inputs.rollouts, inputs.mask_sums)
    assert np.allclose(inputs.spread(found), [1 / 3, 1 / 3, 1 / 3, -2 / 3, -2 / 3])
    ```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_DTYPES: Final = {
    "rewards": np.float64,
    "groups": None,
    "rollouts": None,
    "lengths": np.int64,
    "loss_mask": np.bool_,
    "response_mask": np.bool_,
    "baseline_rewards": np.float64,
    "rewards_per_token": np.float64,
    "kl": np.float64,
    "values": np.float64,
    "old_log_probs": np.float64,
    "ref_log_probs": np.float64,
    "teacher_log_probs": np.float64,
}


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Rewards, groups and tokens of one batch. Columns of tokens hold the samples one after the other.

    Optional columns are None unless the recipe's estimator or its settings need them. Lists become arrays of the dtypes
    below. A column of another length raises a ValueError.
    """

    rewards: Floats  # [B], reward units; one that is not finite in float32 is excluded
    groups: Ints  # [B], prompt group, in any order
    rollouts: Ints  # [B], equal for the parts of one rollout
    lengths: Ints  # [B], tokens of prompt and response, N in total
    loss_mask: Flags  # [N], true where the token trains
    response_mask: Flags  # [N], true from a sample's first sampled token to its end, tool output included
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])  # [B] each, by the grader's name
    baseline_rewards: Floats | None = None  # [B], of the greedy response to the same prompt
    rewards_per_token: Floats | None = None  # [N], of the grader; the rest of a sample's reward is on its last token
    kl: Floats | None = None  # [N], divergence of the old policy from the reference, nats; 0 where no token trains
    values: Floats | None = None  # [N], of the critic, before the token
    old_log_probs: Floats | None = None  # [N], nats; 0 where the token does not train
    ref_log_probs: Floats | None = None  # [N], nats; 0 where the token does not train
    teacher_log_probs: Floats | None = None  # [N], nats; 0 where the token does not train

    def __post_init__(self) -> None:
        for name, kind in _DTYPES.items():
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(values, dtype=kind))
        named = {name: np.asarray(values, dtype=np.float64) for name, values in self.named_rewards.items()}
        object.__setattr__(self, "named_rewards", named)
        num_samples, num_tokens = len(self.lengths), int(self.lengths.sum())
        sizes = {"rewards": num_samples, "groups": num_samples, "rollouts": num_samples, "loss_mask": num_tokens}
        sizes |= {"response_mask": num_tokens, "baseline_rewards": num_samples, "kl": num_tokens, "values": num_tokens}
        sizes |= {"rewards_per_token": num_tokens}
        sizes |= {"old_log_probs": num_tokens, "ref_log_probs": num_tokens, "teacher_log_probs": num_tokens}
        for name, size in sizes.items():
            values = getattr(self, name)
            if values is not None and values.shape != (size,):
                raise ValueError(f"{name} has shape {values.shape}, expected ({size},)")
        for name, values in self.named_rewards.items():
            if values.shape != (num_samples,):
                raise ValueError(f"named_rewards[{name!r}] has shape {values.shape}, expected ({num_samples},)")

    @cached_property
    def mask_sums(self) -> Ints:
        """Trained tokens of each sample, [B]."""
        return sample_sums(self.loss_mask.astype(np.int64), self.lengths)

    def spread(self, values: Floats) -> Floats:
        """Expand one number per sample to a column, [N]."""
        return np.repeat(values, self.lengths)


class Advantages(NamedTuple):
    """Result of an estimator."""

    advantages: Floats  # [N], before whitening; NaN for samples without a usable reward
    returns: Floats | None = None  # [N], goal of the critic; None: the estimator has none


def sample_sums(values: NDArray[Any], lengths: Ints) -> NDArray[Any]:
    """Sum a column over each sample: sum of values[start : start + length].

    Args:
        values: [N], int64 or float64.
        lengths: [B], tokens of each sample, which follow each other.

    Returns:
        [B], of the same dtype.

    Edges:
        A sample without tokens has the sum 0.

    Source:
        Plain sums.
    """
    found = np.zeros(len(lengths), dtype=values.dtype)
    has_tokens = lengths > 0
    if has_tokens.any():
        found[has_tokens] = np.add.reduceat(values, (np.cumsum(lengths) - lengths)[has_tokens])
    return found
