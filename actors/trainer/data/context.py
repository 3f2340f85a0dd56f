"""Context-parallel sharding of sequences: each rank has one chunk from the front and one from the back.

With C ranks a sequence consists of 2 * C equal chunks. Rank r has the chunks r and 2 * C - 1 - r, in this order, as
Megatron-core's rotary embedding expects. Causal attention then costs every rank the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """A context-parallel rank and the size of its group."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Divisor of the length of every sequence."""
        return 2 * self.size if self.size > 1 else 1

    def kept(self, lengths: Ints) -> Ints:
        """Return the positions that this rank holds, in concatenated sequences.

        Args:
            lengths: Lengths of the sequences; each divides by `multiple`.

        Returns:
            Positions, rising within each chunk. A sequence's two chunks follow each other.
        """
        if self.size == 1:
            return np.arange(int(lengths.sum()), dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        chunks = lengths // self.multiple
        parts = [
            start + which * chunk + np.arange(chunk)
            for start, chunk in zip(starts.tolist(), chunks.tolist(), strict=True)
            for which in (self.rank, self.multiple - 1 - self.rank)
        ]
        return np.concatenate(parts).astype(np.int64)

    def order(self, lengths: Ints) -> Ints:
        """Return each position's index in the concatenated parts of all ranks. Undoes the sharding."""
        everybody = [Context(rank, self.size).kept(lengths) for rank in range(self.size)]
        return np.argsort(np.concatenate(everybody), kind="stable")
