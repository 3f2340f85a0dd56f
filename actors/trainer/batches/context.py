"""How context-parallel ranks share a sequence: each has a chunk from its front and one from its back.

With C ranks a sequence of 2 * C equal chunks gives rank r the chunks r and 2 * C - 1 - r, in this order, as
Megatron-core's rotary embedding expects. Causal attention then costs every rank the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """A rank among those that share each sequence."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """What the length of a sequence must divide by."""
        return 2 * self.size if self.size > 1 else 1

    def kept(self, lengths: Ints) -> Ints:
        """The positions that this rank has, of sequences behind each other.

        Args:
            lengths: of the sequences; each divides by `multiple`.

        Returns:
            Rising within each chunk; a sequence's two chunks lie behind each other.
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
        """Where each position is in the ranks' parts behind each other: undoes the cut."""
        everybody = [Context(rank, self.size).kept(lengths) for rank in range(self.size)]
        return np.argsort(np.concatenate(everybody), kind="stable")
