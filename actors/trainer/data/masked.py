"""Masking of samples whose loss is not finite.

B samples, N tokens of the batch. A masked sample trains as if its loss mask were all zeros. It enters no gradient and
no mean over tokens. Its rollout still counts in the denominator of means over rollouts. Its reward, if finite, still
counts in its group.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import Ints, MicroBatch, MtpInputs, TrainBatch, only_where

Flags = NDArray[np.bool_]


def samples_with(batch: TrainBatch, flags_N: Flags) -> Flags:
    """Return which samples have a flagged token, [B]."""
    return np.logical_or.reduceat(flags_N, batch.starts_B)


def with_masked(batch: TrainBatch, masked_B: Flags) -> TrainBatch:
    """Return the batch with the loss mask of masked samples set to 0."""
    masked_N = np.repeat(masked_B, batch.lengths_B)
    return replace(batch, loss_mask_N=np.where(masked_N, 0, batch.loss_mask_N).astype(np.uint8))


def without(batch: TrainBatch, micro_batch: MicroBatch, masked_B: Flags) -> MicroBatch:
    """Replace masked samples of a micro-batch, or of a context-parallel rank's part of one, by padding.

    Their tokens are no inputs either: a gradient of 0 through a forward pass with NaN is NaN. All other tokens keep
    their positions, because the recorded experts of an earlier pass depend on them.
    """
    masked_N = np.repeat(masked_B, batch.lengths_B)
    gone = (micro_batch.sources >= 0) & masked_N[micro_batch.sources]
    kept_M = ~masked_N[micro_batch.columns_M]
    routed, mtp = micro_batch.routed_experts, micro_batch.mtp
    return replace(
        micro_batch,
        tokens=np.where(gone, 0, micro_batch.tokens),
        sources=np.where(gone, -1, micro_batch.sources),
        rows_M=micro_batch.rows_M[kept_M],
        targets_M=micro_batch.targets_M[kept_M],
        columns_M=micro_batch.columns_M[kept_M],
        routed_experts=None if routed is None else only_where(~gone, routed),
        mtp=None if mtp is None else _mtp_without(mtp, gone),
    )


def _mtp_without(mtp: MtpInputs, gone: Flags) -> MtpInputs:
    kept_F = ~gone.ravel()[mtp.rows_F]
    return MtpInputs(np.where(gone, 0, mtp.tokens), mtp.rows_F[kept_F], mtp.targets_F[kept_F])


def names_of(batch: TrainBatch, samples: Ints) -> Sequence[str]:
    """Name samples for messages."""
    places = zip(batch.groups_B[samples], batch.indices_B[samples], batch.parts_B[samples], strict=True)
    return [f"group {group}, sample {index}, part {part}" for group, index, part in places]
