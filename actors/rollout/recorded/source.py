"""Where samples that exist already come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from messages import Prompt, RolloutRequested, SampleSummary, Segment


@dataclass(frozen=True)
class RecordedSample:
    """A sample that exists already: its segments in order, and what the event says of it."""

    segments: tuple[Segment, ...]  # of the sample (group_id, attempt, index, part) that the task asks for
    summary: SampleSummary  # its `segments` are filled in when these are stored


class AnswerSource(Protocol):
    """Where the samples of a task come from."""

    def answer(self, task: RolloutRequested) -> Sequence[RecordedSample]:
        """The samples of a task's group, scored. Called on a thread, one call at a time; the same task gets the same.

        Raises:
            ValueError: there are none; says why. The group then fails with that reason.
            OSError: they cannot be read now; the actor ends and is started again.
        """
        ...

    def prompt(self, task: RolloutRequested) -> Prompt:
        """The prompt that they answer, the task's or another. Called after `answer`, and raises like it."""
        ...
