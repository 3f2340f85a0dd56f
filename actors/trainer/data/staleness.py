"""Staleness of sampled tokens in train steps, and the masking of stale tokens. Pure.

T response tokens of one segment, N tokens of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import TrainBatch
from messages import Segment
from runtime.settings.recipe import RolloutConfig

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


def staleness_of(segment: Segment, step: int, steps_of_versions: Mapping[int, int]) -> NDArray[np.int32]:
    """Count the train steps between the weights that sampled each token and those that the step starts from.

    Args:
        segment: Segment with T response tokens.
        step: Train step of the batch.
        steps_of_versions: Train steps that each published weight version contains. A missing version counts as older
            than all.

    Returns:
        [T], NOT_SAMPLED where the token does not train.
    """
    ages = [max(0, step - steps_of_versions.get(span.version, -1)) for span in segment.weight_spans]
    staleness_T = np.repeat(np.array(ages, dtype=np.int32), _span_lengths(segment))
    staleness_T[np.asarray(segment.loss_mask) == 0] = NOT_SAMPLED
    return staleness_T


def loss_masks(
    segments: Sequence[Segment], stalenesses: Sequence[NDArray[np.int32]], masking: Masking
) -> list[NDArray[np.uint8]]:
    """Compute which tokens of one sample train.

    Args:
        segments: Segments of the sample, in order.
        stalenesses: Staleness of their tokens.
        masking: Masking on top of the segments' own loss masks.

    Returns:
        For each segment [T], 1 where the token trains.
    """
    masks = [np.asarray(segment.loss_mask) != 0 for segment in segments]
    if masking.off_policy:
        versions = [_versions_of(segment) for segment in segments]
        newest = max((int(some[mask].max(initial=0)) for some, mask in zip(versions, masks, strict=True)), default=0)
        masks = [mask & (some == newest) for some, mask in zip(versions, masks, strict=True)]
    if masking.max_staleness is not None:
        limit = masking.max_staleness
        masks = [mask & (some <= limit) for some, mask in zip(stalenesses, masks, strict=True)]
    return [mask.astype(np.uint8) for mask in masks]


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


def _versions_of(segment: Segment) -> NDArray[np.int64]:
    return np.repeat(np.array([span.version for span in segment.weight_spans], dtype=np.int64), _span_lengths(segment))


def _span_lengths(segment: Segment) -> list[int]:
    return [span.end - span.start for span in segment.weight_spans]
