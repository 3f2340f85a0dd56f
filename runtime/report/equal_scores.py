"""Detects a run whose first scores are all equal: grader and model do not match, or the task is solved. Pure."""

from collections.abc import Sequence
from typing import Final

from messages import SampleStatus, SampleSummary
from runtime.report.group_numbers import is_ungraded

WATCHED: Final = 64  # graded samples


class EqualScores:
    """Checks samples from the start of a run, until two scores differ or WATCHED are equal."""

    def __init__(self) -> None:
        self._num = 0
        self._num_truncated = 0
        self._score: float | None = None
        self._over = False

    def take(self, samples: Sequence[SampleSummary]) -> bool:
        """Add samples; return whether the first WATCHED ones are complete and all equal. True at most once."""
        for sample in samples:
            if self._over or sample.reward is None or is_ungraded(sample):
                continue
            self._over = self._score is not None and sample.reward != self._score
            self._score = sample.reward
            self._num += 1
            self._num_truncated += sample.status is SampleStatus.TRUNCATED
        if self._over or self._num < WATCHED:
            return False
        self._over = True
        return True

    @property
    def why(self) -> tuple[str, ...]:
        """The finding, in lines."""
        return (f"all of the first {self._num} graded samples have the same score, {self._score or 0.0:g}",)

    @property
    def causes(self) -> tuple[str, ...]:
        """Likely causes, in lines, most likely first."""
        cut = f"{self._num_truncated} of {self._num} responses were cut: rollout.max_response_len is too small"
        return (
            "  likely causes, if the score should differ:",
            *([f"    {cut}, or the model never ends its turn"] if self._num_truncated else ()),
            "    the response has special tokens in it, such as an end of turn: rollout.skip_special_tokens = true",
            "    the label is another column than the grader compares with, or written in another form: data.label_key",
            "    the prompt lacks its chat template: data.apply_chat_template = true",
            "    the task is too hard for this model, or too easy",
        )
