"""Answers tasks from a dump: the k-th issued group gets the k-th dumped group, with its samples and scores."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.rollout.offline.actor import OfflineSample
from messages import Prompt, RolloutRequested, SampleKey, Segment
from runtime.data.dumped_run import DumpedGroups
from runtime.data.dumps import DumpedGroup, baseline_of, summary_of

EXHAUSTED = "the dump is exhausted"


class Dumped:
    """The samples of a dump with their original rewards, log-probs and weight versions."""

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        """Open a dump. Raises DumpError, a ValueError, if there is no readable dump."""
        self._groups = DumpedGroups(directory, vocab_size)

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        """Return the dumped group at the task's position in issue order.

        Raises:
            ValueError: the dump has no more groups, or this group is unreadable.
        """
        return samples_for(task, self._group(task))

    def prompt(self, task: RolloutRequested) -> Prompt:
        """Return the prompt that the dumped group was sampled for."""
        first = self._group(task).samples[0]
        return msgspec.structs.replace(
            task.prompt, data=first.data, text=first.prompt, label=first.label, metadata=first.metadata
        )

    def _group(self, task: RolloutRequested) -> DumpedGroup:
        try:
            return self._groups.group(task.group_id)
        except IndexError as error:
            raise ValueError(EXHAUSTED) from error


def samples_for(task: RolloutRequested, group: DumpedGroup) -> list[OfflineSample]:
    """Return a dumped group with its sample keys replaced by those of the task."""
    found: list[OfflineSample] = []
    for sample, segments, columns in zip(group.samples, group.segments, group.columns_of_samples, strict=True):
        key = SampleKey(group_id=task.group_id, attempt=task.attempt, index=sample.index, part=sample.part)
        renamed = tuple(_renamed(segment, key) for segment in segments)
        found.append(OfflineSample(renamed, summary_of(sample), columns))
    if (baseline := baseline_of(group)) is not None:
        found.append(OfflineSample((), baseline))
    return found


def _renamed(segment: Segment, key: SampleKey) -> Segment:
    return msgspec.structs.replace(segment, sample=key)
