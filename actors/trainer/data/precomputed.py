"""Precomputed log-probs of groups that are in no batch yet. N tokens, B samples."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from actors.trainer.data.batch import Floats32, Ints, TrainBatch

MAX_BYTES: Final = 1 << 30  # of kept columns; beyond it, log-probs are computed with their batch


class LogProbs(NamedTuple):
    """Log-prob columns of a batch or of one group of it. None: not needed, or not computed."""

    ref_N: Floats32 | None = None
    old_N: Floats32 | None = None

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return sum(column.nbytes for column in self if column is not None)


class PrecomputedLogProbs:
    """Precomputed log-probs by the log sequence of the group's completion, within a memory limit."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Start empty."""
        self._precomputed: dict[int, LogProbs] = {}
        self._max_bytes = max_bytes

    def __contains__(self, seq: int) -> bool:
        return seq in self._precomputed

    def has_room(self) -> bool:
        """Whether another group may be added."""
        return sum(columns.size_bytes for columns in self._precomputed.values()) < self._max_bytes

    def add(self, seq: int, columns: LogProbs) -> None:
        """Store the columns of a group."""
        self._precomputed[seq] = columns

    def weights_moved(self, waiting: Collection[int]) -> None:
        """Discard old-policy log-probs of all groups, and groups that no batch can take any more.

        Args:
            waiting: Log sequences of the groups that a batch can still take.
        """
        kept = {seq: LogProbs(ref_N=columns.ref_N) for seq, columns in self._precomputed.items() if seq in waiting}
        self._precomputed = {seq: columns for seq, columns in kept.items() if columns.ref_N is not None}

    def put_into(self, batch: TrainBatch, seqs: Mapping[int, int]) -> tuple[TrainBatch, float]:
        """Return the batch with its precomputed log-probs, and the share of its groups that have some.

        Args:
            batch: The batch as assembled.
            seqs: Log sequences of completions by group.
        """
        whole = LogProbs(*(np.full_like(batch.rollout_log_probs_N, np.nan) for _ in LogProbs._fields))
        places = _places_of_groups(batch)
        for group, tokens in places.items():
            for column_N, precomputed_N in zip(whole, self._precomputed.get(seqs[group], LogProbs()), strict=True):
                if column_N is not None and precomputed_N is not None:
                    column_N[tokens] = precomputed_N
        share = sum(seqs[group] in self._precomputed for group in places) / len(places)
        of_pool = batch.ref_log_probs_N is not None
        ref_N = batch.ref_log_probs_N if of_pool else whole.ref_N
        return replace(batch, ref_log_probs_N=ref_N, old_log_probs_N=whole.old_N), share


def _places_of_groups(batch: TrainBatch) -> dict[int, slice]:
    """Return the range of each group's tokens in the columns of the batch."""
    firsts_B = np.flatnonzero(np.diff(batch.groups_B, prepend=-1))
    starts = [*batch.starts_B[firsts_B].tolist(), len(batch.tokens_N)]
    return {
        group: slice(begin, end)
        for group, begin, end in zip(batch.groups_B[firsts_B].tolist(), starts[:-1], starts[1:], strict=True)
    }


def groups_to_compute(batch: TrainBatch, precomputed_N: Floats32, groups_B: Ints) -> Ints:
    """Return the given groups that lack a precomputed value for a token, in rising order."""
    missing_B = np.logical_or.reduceat(np.isnan(precomputed_N), batch.starts_B)
    return np.intersect1d(batch.groups_B[missing_B], groups_B)
