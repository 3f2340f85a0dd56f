"""Answers from a dump: the k-th group that is issued gets the k-th group of the dump, as it was sampled and scored."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.rollout.recorded.source import RecordedSample
from messages import Prompt, RolloutRequested, SampleKey, Segment
from runtime.samples.dumped_run import DumpedGroups
from runtime.samples.dumps import DumpedGroup, summary_of

EXHAUSTED = "the dump is exhausted"


class Dumped:
    """The samples of a dump, with the rewards, log-probs and weight versions that they had."""

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        """Raises DumpError, a ValueError, when there is no dump that can be read."""
        self._groups = DumpedGroups(directory, vocab_size)

    def answer(self, task: RolloutRequested) -> Sequence[RecordedSample]:
        """The group at the task's place in the order of issue.

        Raises:
            ValueError: the dump has no more groups, or this one cannot be read.
        """
        return samples_for(task, self._group(task))

    def prompt(self, task: RolloutRequested) -> Prompt:
        """The prompt that the group was sampled for."""
        first = self._group(task).samples[0]
        return msgspec.structs.replace(
            task.prompt, data=first.data, text=first.prompt, label=first.label, metadata=first.metadata
        )

    def _group(self, task: RolloutRequested) -> DumpedGroup:
        try:
            return self._groups.group(task.group_id)
        except IndexError as error:
            raise ValueError(EXHAUSTED) from error


def samples_for(task: RolloutRequested, group: DumpedGroup) -> list[RecordedSample]:
    """A dumped group under the names of the group that a task asks for."""
    found: list[RecordedSample] = []
    for sample, segments in zip(group.samples, group.segments, strict=True):
        key = SampleKey(group_id=task.group_id, attempt=task.attempt, index=sample.index, part=sample.part)
        renamed = tuple(_renamed(segment, key) for segment in segments)
        found.append(RecordedSample(renamed, summary_of(sample)))
    return found


def _renamed(segment: Segment, key: SampleKey) -> Segment:
    return msgspec.structs.replace(segment, sample=key)
