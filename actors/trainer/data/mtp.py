"""MTP (multi-token prediction) inputs of a micro-batch.

A position with input token i also gets token i + 1, and predicts token i + 2. F tokens are predicted this way.
"""

from dataclasses import replace

import numpy as np

from actors.trainer.data.batch import Ints, MicroBatch, MtpInputs, TrainBatch


def with_mtp(batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
    """Add the MTP inputs to a micro-batch, or to a context-parallel rank's part of one."""
    known, last = micro_batch.sources >= 0, len(batch.tokens_N) - 1
    column = np.where(known, micro_batch.sources, 0)
    sample = np.searchsorted(batch.starts_B, column, side="right") - 1
    after_next = np.minimum(column + 2, last)
    inside = known & (column + 2 < batch.starts_B[sample] + batch.lengths_B[sample])
    rows_F = np.flatnonzero(inside & (batch.loss_mask_N[after_next] != 0))
    mtp = MtpInputs(
        tokens=np.where(known, batch.tokens_N[np.minimum(column + 1, last)], 0).astype(np.int64),
        rows_F=rows_F,
        targets_F=batch.tokens_N[after_next.ravel()[rows_F]].astype(np.int64),
    )
    return replace(micro_batch, mtp=mtp)


def num_mtp_tokens(batch: TrainBatch, samples: Ints) -> int:
    """Count the tokens that `with_mtp` predicts: trained tokens with two tokens before them."""
    place_N = np.arange(len(batch.tokens_N)) - np.repeat(batch.starts_B, batch.lengths_B)
    counted_N = (batch.loss_mask_N != 0) & (place_N >= 2)
    return int(np.add.reduceat(counted_N.astype(np.int64), batch.starts_B)[samples].sum())
