"""Which of the last optimizer steps were skipped, and whether those are too many. Pure."""

import math
from dataclasses import dataclass
from typing import Self

from runtime.settings.recipe import TrainConfig


@dataclass(frozen=True)
class Skips:
    """Skipped optimizer steps up to now, over batches and restarts."""

    in_a_row: int = 0  # since the last step that was not skipped
    recent: tuple[bool, ...] = ()  # whether each of the last train.skip_window steps was skipped, oldest first

    def then(self, *, skipped: bool, window: int) -> Self:
        """Add a step.

        Args:
            skipped: whether it was.
            window: how many steps `recent` covers.
        """
        return type(self)(self.in_a_row + 1 if skipped else 0, (*self.recent, skipped)[-window:])


def too_many(skips: Skips, train: TrainConfig) -> str:
    """Name the limit that the last step broke; empty if none."""
    if skips.in_a_row > train.max_skipped:
        return f"{skips.in_a_row} in a row; train.max_skipped = {train.max_skipped} are allowed"
    found, window, share = sum(skips.recent), train.skip_window, train.max_skipped_share
    allowed = math.floor(share * window + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if found > allowed:
        return (
            f"{found} of the last {window} optimizer steps; train.max_skipped_share = {share:g} "
            f"of train.skip_window = {window} allows {allowed}"
        )
    return ""
