"""Staleness of sampled tokens in train steps, and the masking of stale tokens. Pure.

R response tokens of several segments, N tokens of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import TrainBatch
from messages import Segment
from runtime.settings.tables.rollout import RolloutConfig

_Number = TypeVar("_Number", bound=np.number[Any])

NOT_SAMPLED: Final = -1  # staleness of tokens that never train: prompts, tool output


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Masking settings: tokens to mask because of the weights that sampled them."""

    off_policy: bool = False  # True: tokens of older weights than the newest of their sample
    max_staleness: int | None = None  # tokens above this staleness, in train steps; None: no limit

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """Read the masking from the recipe."""
        masks = rollout.stale_tokens == "mask"
        return cls(off_policy=rollout.mask_off_policy, max_staleness=rollout.max_token_staleness if masks else None)


def staleness_of(segments: Sequence[Segment], step: int, steps_of_versions: Mapping[int, int]) -> NDArray[np.int32]:
    """Count the train steps between the weights that sampled each token and those that the step starts from.

    Args:
        segments: Segments with R response tokens together.
        step: Train step of the batch.
        steps_of_versions: Train steps that each published weight version contains. A missing version counts as older
            than all.

    Returns:
        [R], NOT_SAMPLED where the token does not train.
    """
    spans = [span for segment in segments for span in segment.weight_spans]
    ages = [max(0, step - steps_of_versions.get(span.version, -1)) for span in spans]
    staleness_R = np.repeat(np.array(ages, dtype=np.int32), [span.end - span.start for span in spans])
    staleness_R[joined([segment.loss_mask for segment in segments], np.uint8) == 0] = NOT_SAMPLED
    return staleness_R


def loss_mask_of(
    samples: Sequence[Sequence[Segment]], staleness_R: NDArray[np.int32], masking: Masking
) -> NDArray[np.uint8]:
    """Compute which tokens train.

    Args:
        samples: Segments of each sample, in order, with R response tokens together.
        staleness_R: Staleness of these tokens.
        masking: Masking on top of the segments' own loss masks.

    Returns:
        [R], 1 where the token trains.
    """
    segments = [segment for sample in samples for segment in sample]
    mask_R = joined([segment.loss_mask for segment in segments], np.uint8) != 0
    if masking.off_policy:
        spans = [
            (number, span) for number, sample in enumerate(samples) for some in sample for span in some.weight_spans
        ]
        lengths = [span.end - span.start for _, span in spans]
        versions_R = np.repeat(np.array([span.version for _, span in spans], dtype=np.int64), lengths)
        samples_R = np.repeat(np.array([number for number, _ in spans], dtype=np.int64), lengths)
        newest = np.zeros(len(samples), dtype=np.int64)
        np.maximum.at(newest, samples_R[mask_R], versions_R[mask_R])
        mask_R &= versions_R == newest[samples_R]
    if masking.max_staleness is not None:
        mask_R &= staleness_R <= masking.max_staleness
    return mask_R.astype(np.uint8)


def joined(arrays: Sequence[NDArray[Any]], dtype: type[_Number]) -> NDArray[_Number]:
    """Concatenate arrays of one dtype; there may be none."""
    return np.concatenate([np.zeros(0, dtype), *map(np.asarray, arrays)])


def staleness_metrics(batch: TrainBatch) -> dict[str, float]:
    """Staleness metrics of trainable tokens, masked or not: by token, and by group as the mean of its tokens."""
    sampled_N = batch.staleness_N != NOT_SAMPLED
    staleness = batch.staleness_N[sampled_N].astype(np.float64)
    if not len(staleness):
        return {}
    _, groups = np.unique(np.repeat(batch.groups_B, batch.lengths_B)[sampled_N], return_inverse=True)
    group_means = np.bincount(groups, weights=staleness) / np.bincount(groups)
    return {
        "rollout/staleness_mean": float(staleness.mean()),
        "rollout/staleness_max": float(staleness.max()),
        "rollout/group_staleness_mean": float(group_means.mean()),
        "rollout/group_staleness_max": float(group_means.max()),
        "rollout/off_policy_ratio": float((staleness > 0).mean()),
        "rollout/masked_ratio": float((batch.loss_mask_N[sampled_N] == 0).mean()),
    }
