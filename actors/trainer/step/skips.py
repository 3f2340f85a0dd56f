"""Counts of skipped optimizer steps and their limits. Pure."""

import math
from dataclasses import dataclass
from typing import Self

from runtime.settings.tables.training import TrainConfig


@dataclass(frozen=True)
class Skips:
    """Skipped optimizer steps so far, across batches and restarts."""

    in_a_row: int = 0  # consecutive skipped steps up to now
    recent: tuple[bool, ...] = ()  # True for each skipped step of the last train.skip_window steps, oldest first

    def then(self, *, skipped: bool, window: int) -> Self:
        """Return the record with one more optimizer step.

        Args:
            skipped: Whether the step was skipped.
            window: Number of steps that `recent` covers.
        """
        return type(self)(self.in_a_row + 1 if skipped else 0, (*self.recent, skipped)[-window:])


def too_many(skips: Skips, train: TrainConfig) -> str:
    """Describe the limit that the last step exceeded. Empty if none."""
    if skips.in_a_row > train.max_skipped:
        return f"{skips.in_a_row} in a row; train.max_skipped = {train.max_skipped} are allowed"
    found, window, share = sum(skips.recent), train.skip_window, train.max_skipped_share
    allowed = math.floor(share * window + 1e-9)  # the tolerance: 0.29 * 100 is 28.999999999999996
    if found > allowed:
        return (
            f"{found} of the last {window} optimizer steps; train.max_skipped_share = {share:g} "
            f"of train.skip_window = {window} allows {allowed}"
        )
    return ""
