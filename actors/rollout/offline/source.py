"""The interface of a source of existing samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from messages import Prompt, RolloutRequested, SampleSummary, Segment


@dataclass(frozen=True)
class OfflineSample:
    """An existing sample: its segments in order, and its summary for the event."""

    segments: tuple[Segment, ...]  # carry the task's sample key (group_id, attempt, index, part)
    summary: SampleSummary  # its `segments` field is filled in when they are stored


class AnswerSource(Protocol):
    """A source of samples for tasks."""

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        """Return the scored samples of a task's group.

        Runs on a thread, one call at a time. The same task always gets the same samples.

        Raises:
            ValueError: there are none; the message is the reason. The group fails with that reason.
            OSError: they are temporarily unreadable; the actor exits and is restarted.
        """
        ...

    def prompt(self, task: RolloutRequested) -> Prompt:
        """Return the prompt that the samples answer: the task's or another one.

        Called after `answer`; raises the same errors.
        """
        ...
