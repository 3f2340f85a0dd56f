"""Samples that are taken out of an optimizer step, as their loss is not finite.

B samples, N tokens of the batch. A masked sample trains as if none of its tokens had a loss mask: it is in no gradient
and in no mean over tokens, its rollout counts in the denominator of means over rollouts, and its reward, if that is
finite, counts in its group.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.trainer.batches.batch import Further, Ints, MicroBatch, TrainBatch, only_where

Flags = NDArray[np.bool_]


def samples_with(batch: TrainBatch, flags_N: Flags) -> Flags:
    """Which samples have a token with a flag, [B]."""
    return np.logical_or.reduceat(flags_N, batch.starts_B)


def with_masked(batch: TrainBatch, masked_B: Flags) -> TrainBatch:
    """The batch, in which no token of masked samples trains."""
    masked_N = np.repeat(masked_B, batch.lengths_B)
    return replace(batch, loss_mask_N=np.where(masked_N, 0, batch.loss_mask_N).astype(np.uint8))


def without(batch: TrainBatch, micro_batch: MicroBatch, masked_B: Flags) -> MicroBatch:
    """A micro-batch, or a context-parallel rank's part of one, with padding in the place of masked samples.

    Their tokens are not read either: through a forward pass that is NaN, a gradient of 0 becomes NaN. All other tokens
    keep their places, for which the experts of an earlier pass were kept.
    """
    masked_N = np.repeat(masked_B, batch.lengths_B)
    gone = (micro_batch.sources >= 0) & masked_N[micro_batch.sources]
    kept_M = ~masked_N[micro_batch.columns_M]
    routed, further = micro_batch.routed_experts, micro_batch.further
    return replace(
        micro_batch,
        tokens=np.where(gone, 0, micro_batch.tokens),
        sources=np.where(gone, -1, micro_batch.sources),
        rows_M=micro_batch.rows_M[kept_M],
        targets_M=micro_batch.targets_M[kept_M],
        columns_M=micro_batch.columns_M[kept_M],
        routed_experts=None if routed is None else only_where(~gone, routed),
        further=None if further is None else _further_without(further, gone),
    )


def _further_without(further: Further, gone: Flags) -> Further:
    kept_F = ~gone.ravel()[further.rows_F]
    return Further(np.where(gone, 0, further.tokens), further.rows_F[kept_F], further.targets_F[kept_F])


def names_of(batch: TrainBatch, samples: Ints) -> Sequence[str]:
    """Samples as messages name them."""
    places = zip(batch.groups_B[samples], batch.indices_B[samples], batch.parts_B[samples], strict=True)
    return [f"group {group}, sample {index}, part {part}" for group, index, part in places]
