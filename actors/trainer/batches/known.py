"""Log-probs of groups that were computed before there was a batch with them. N tokens, B samples."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from actors.trainer.batches.batch import Floats32, Ints, TrainBatch

MAX_BYTES: Final = 1 << 30  # of columns that are kept; beyond, groups wait for their batch


class LogProbs(NamedTuple):
    """Columns of a batch or of one group of it; none: not asked for, or not known."""

    ref_N: Floats32 | None = None
    old_N: Floats32 | None = None

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(column.nbytes for column in self if column is not None)


class KnownLogProbs:
    """Log-probs of groups by the log sequence of their completion, as many as there is room for."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """None yet."""
        self._known: dict[int, LogProbs] = {}
        self._max_bytes = max_bytes

    def __contains__(self, seq: int) -> bool:
        return seq in self._known

    def has_room(self) -> bool:
        """Whether another group may be added."""
        return sum(columns.size_bytes for columns in self._known.values()) < self._max_bytes

    def add(self, seq: int, columns: LogProbs) -> None:
        """Keep those of a group."""
        self._known[seq] = columns

    def weights_moved(self, waiting: Collection[int]) -> None:
        """Forget the old policy's of all groups, and groups that no batch can take any more.

        Args:
            waiting: log sequences of the groups that one can.
        """
        kept = {seq: LogProbs(ref_N=columns.ref_N) for seq, columns in self._known.items() if seq in waiting}
        self._known = {seq: columns for seq, columns in kept.items() if columns.ref_N is not None}

    def put_into(self, batch: TrainBatch, seqs: Mapping[int, int]) -> tuple[TrainBatch, float]:
        """A batch with what is known of its groups, and the share of them of which something is.

        Args:
            batch: as it was put together.
            seqs: log sequences of completions by group.
        """
        whole = LogProbs(*(np.full_like(batch.rollout_log_probs_N, np.nan) for _ in LogProbs._fields))
        places = _places_of_groups(batch)
        for group, tokens in places.items():
            for column_N, known_N in zip(whole, self._known.get(seqs[group], LogProbs()), strict=True):
                if column_N is not None and known_N is not None:
                    column_N[tokens] = known_N
        share = sum(seqs[group] in self._known for group in places) / len(places)
        return replace(batch, ref_log_probs_N=whole.ref_N, old_log_probs_N=whole.old_N), share


def _places_of_groups(batch: TrainBatch) -> dict[int, slice]:
    """Where the tokens of each group are."""
    firsts_B = np.flatnonzero(np.diff(batch.groups_B, prepend=-1))
    starts = [*batch.starts_B[firsts_B].tolist(), len(batch.tokens_N)]
    return {
        group: slice(begin, end)
        for group, begin, end in zip(batch.groups_B[firsts_B].tolist(), starts[:-1], starts[1:], strict=True)
    }


def unknown_groups(batch: TrainBatch, known_N: Floats32, groups_B: Ints) -> Ints:
    """Those of some groups of a batch of which a token's number is not known, rising."""
    unknown_B = np.logical_or.reduceat(np.isnan(known_N), batch.starts_B)
    return np.intersect1d(batch.groups_B[unknown_B], groups_B)
