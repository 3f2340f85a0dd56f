"""Groups whose samples people look at, and the index of those in a run's dumps. A run may go on writing them."""

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from messages import Outcome, Segment
from runtime.data.columns import DumpError
from runtime.data.dump_files import check_columns, lines_path, read_sample, sample_lines
from runtime.data.dumps import DumpedSample, Fate
from runtime.data.trained_tokens import TrainedSample, read_trained

KEPT_GROUPS: Final = 20_000  # newest ones; about 1 kB of memory each
MAX_STEP_DIGITS: Final = 12
_NAME: Final = re.compile(rf"rollout_([0-9]{{1,{MAX_STEP_DIGITS}}})\.jsonl")

Sort = Literal["step", "reward", "spread", "length"]
SORTS: Final = ("step", "reward", "spread", "length")


class IndexedGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a completed group without its texts and tokens."""

    step: int  # of the files that hold it
    group_id: int
    attempt: int
    first_row: int = 0  # of its samples in the files
    begin: int = 0  # byte at which its lines begin
    rewards: tuple[float | None, ...]  # of each sample
    lengths: tuple[int, ...]  # response tokens of each sample
    versions: tuple[int, int] | None = None  # oldest and newest weights that sampled it
    outcome: str = ""
    reason: str = ""  # why it was not trained

    @property
    def mean_reward(self) -> float | None:
        """The mean of those that have one."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None

    @property
    def spread(self) -> float | None:
        """Largest reward less smallest."""
        known = [reward for reward in self.rewards if reward is not None]
        return max(known) - min(known) if known else None

    @property
    def mean_length(self) -> float:
        """The mean of all samples."""
        return sum(self.lengths) / len(self.lengths)


class Found(NamedTuple):
    """A part of the groups that were searched for."""

    groups: list[IndexedGroup]
    next: int | None  # offset at which the search goes on; None: it is complete
    total: int  # groups to search


class SampleIndex:
    """Knows which groups the dumps hold. Steps are read newest first.

    Args:
        directory: of the run's dumps; it need not exist yet.
        kept_groups: bound of the index, in groups; those of older steps are left out.
    """

    def __init__(self, directory: Path, kept_groups: int = KEPT_GROUPS) -> None:
        self.problems: dict[int, str] = {}  # why a step is left out
        self.num_unread = 0  # steps that `advance` has not read yet
        self.num_left_out = 0  # steps that the bound leaves out
        self.directory = directory
        self._kept_groups = kept_groups
        self._known: dict[int, tuple[int, int]] = {}  # time and size of the lines of each step that was read
        self._groups: dict[int, tuple[IndexedGroup, ...]] = {}  # by step
        self._unread: list[int] = []  # oldest first

    def place(self, step: int) -> str:
        """Say where the groups of a step are."""
        return f"files rollout_{step} of step {step + 1}"

    @property
    def num_groups(self) -> int:
        """Groups in the index."""
        return sum(map(len, self._groups.values()))

    def advance(self, budget_s: float) -> None:
        """Notice new and changed files, and read at least one of them, until the time is over.

        Raises:
            DumpError: the directory cannot be read.
        """
        found = _steps_in(self.directory)
        for step in [step for step, known in self._known.items() if found.get(step) != known]:
            del self._known[step]
            self._groups.pop(step, None)
            self.problems.pop(step, None)
        self._unread = sorted(step for step in found if step not in self._known)
        until = time.monotonic() + budget_s
        self.num_left_out = 0
        while self._unread:
            if self._is_full(self._unread[-1]):
                self.num_left_out, self._unread = len(self._unread), []
                break
            step = self._unread.pop()
            self._read(step, found[step])
            if time.monotonic() >= until:
                break
        self.num_unread = len(self._unread)

    def _is_full(self, step: int) -> bool:
        """Drop the oldest steps beyond the bound; return whether a step is older than all that fit."""
        while self.num_groups >= self._kept_groups:
            oldest = min(self._groups)
            if step < oldest:
                return True
            del self._groups[oldest]
            self._known.pop(oldest, None)
        return False

    def _read(self, step: int, known: tuple[int, int]) -> None:
        try:
            groups = tuple(_indexed(self.directory, step))
            check_columns(self.directory, step, sum(len(group.rewards) for group in groups))
        except DumpError as error:
            self.problems[step] = str(error)
        else:
            self._groups[step] = groups
        self._known[step] = known

    def groups(self) -> Iterator[IndexedGroup]:
        """Yield what was read so far, newest step first."""
        for step in sorted(self._groups, reverse=True):
            yield from self._groups[step]

    def group(self, group_id: int, step: int | None = None) -> IndexedGroup | None:
        """Return a known group, of the newest step that has it unless one is named."""
        known = (group for group in self.groups() if step is None or group.step == step)
        return next((group for group in known if group.group_id == group_id), None)

    def lost(self, group: IndexedGroup) -> bool:
        """Whether the files of a known group were removed since they were read."""
        return not lines_path(self.directory, group.step).exists()

    def find(
        self,
        text: str = "",
        *,
        sort: Sort = "step",
        descending: bool = True,
        step: int | None = None,
        offset: int = 0,
        limit: int,
        budget_s: float,
    ) -> Found:
        """Find groups whose prompt, label or a response contains a text.

        Args:
            text: upper and lower case count as equal; empty: all groups.
            sort: key of the order; groups without such a number come last.
            descending: whether the largest comes first.
            step: only groups of this step.
            offset: groups of that order to leave out.
            limit: groups to return at most.
            budget_s: seconds after which the search pauses; it reads at least one group.
        """
        known = [group for group in self.groups() if step is None or group.step == step]
        keys = [(_key(group, sort), group) for group in known]
        ordered = sorted(
            ((key, group) for key, group in keys if key is not None),
            key=lambda item: (item[0], item[1].step, item[1].group_id),
            reverse=descending,
        )
        groups = [group for _, group in ordered] + [group for key, group in keys if key is None]
        found: list[IndexedGroup] = []
        until, wanted = time.monotonic() + budget_s, text.casefold()
        for place in range(offset, len(groups)):
            if not wanted or self._contains(groups[place], wanted):
                found.append(groups[place])
            if place + 1 < len(groups) and (len(found) == limit or time.monotonic() >= until):
                return Found(found, place + 1, len(groups))
        return Found(found, None, len(groups))

    def _contains(self, group: IndexedGroup, wanted: str) -> bool:
        try:
            samples = self.samples(group)
        except DumpError:
            return False  # replaced meanwhile: the next call of `advance` notices
        label = samples[0].label
        shown = label if isinstance(label, str) else msgspec.json.encode(label).decode()
        texts = [samples[0].prompt, shown, *(sample.response for sample in samples)]
        return any(wanted in each.casefold() for each in texts)

    def samples(self, group: IndexedGroup, num: int | None = None) -> list[DumpedSample]:
        """Read the lines of a group.

        Args:
            group: the group.
            num: lines to read; None: all.

        Raises:
            DumpError: the file cannot be read, or was replaced since.
        """
        path, num = lines_path(self.directory, group.step), len(group.rewards) if num is None else num
        samples = [sample for sample, _ in sample_lines(path, group.begin, num)]
        if [(sample.group_id, sample.attempt) for sample in samples] != [(group.group_id, group.attempt)] * num:
            raise DumpError(f"{path}: was replaced while group {group.group_id} was read")
        return samples

    def texts(self, group: IndexedGroup, places: Sequence[int]) -> tuple[str, Any, list[str]]:
        """Read the lines of a group up to those of its places. The first one has its prompt and its label."""
        samples = self.samples(group, max(places, default=0) + 1)
        return samples[0].prompt, samples[0].label, [samples[place].response for place in places]

    def tokens(self, group: IndexedGroup, place: int, sample: DumpedSample) -> tuple[Segment, ...]:
        """Read the tokens of a sample.

        Raises:
            DumpError: its columns cannot be read, or the files were replaced since.
        """
        return read_sample(self.directory, group.step, group.first_row + place, sample)

    def trained(self, sample: DumpedSample, segments: Sequence[Segment]) -> TrainedSample | None:
        """Read what the trainer made of a sample; None: it is not in the dumps.

        Raises:
            DumpError: the file of its train step cannot be used.
        """
        if sample.step is None:
            return None
        num_tokens = sum(len(segment.prompt_ids) + len(segment.response_ids) for segment in segments)
        key = sample.group_id, sample.index, sample.part
        return read_trained(self.directory, sample.step, key, num_tokens)


def _key(group: IndexedGroup, sort: Sort) -> float | None:
    match sort:
        case "step":
            return group.step
        case "reward":
            return group.mean_reward
        case "spread":
            return group.spread
        case "length":
            return group.mean_length


def _steps_in(directory: Path) -> dict[int, tuple[int, int]]:
    """Return time and size of the lines of each step."""
    found: dict[int, tuple[int, int]] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    known = entry.stat()
                except FileNotFoundError:
                    continue  # removed meanwhile
                if stat.S_ISREG(known.st_mode):
                    found[int(match[1])] = (known.st_mtime_ns, known.st_size)
    except OSError as error:
        raise DumpError(f"{directory}: cannot be read: {error.strerror or error}") from error
    return found


def _indexed(directory: Path, step: int) -> Iterator[IndexedGroup]:
    """Yield the groups of a step, in the order of the file."""
    path, own, begin, row = lines_path(directory, step), list[DumpedSample](), 0, 0
    for sample, at in sample_lines(path):
        if own and (own[0].group_id, own[0].attempt) != (sample.group_id, sample.attempt):
            yield _group_of(step, own, begin, row)
            own, begin, row = [], at, row + len(own)
        own.append(msgspec.structs.replace(sample, prompt="", response="", segment_texts=(), score=None, metadata={}))
    if not own:
        raise DumpError(f"{path}: is empty")
    yield _group_of(step, own, begin, row)


def _group_of(step: int, samples: list[DumpedSample], begin: int, first_row: int) -> IndexedGroup:
    first = samples[0]
    oldest = [sample.first_version for sample in samples if sample.first_version is not None]
    newest = [sample.last_version for sample in samples if sample.last_version is not None]
    outcome, reason = outcome_of(first)
    return IndexedGroup(
        step=step,
        group_id=first.group_id,
        attempt=first.attempt,
        first_row=first_row,
        begin=begin,
        rewards=tuple(sample.reward for sample in samples),
        lengths=tuple(sample.response_len for sample in samples),
        versions=(min(oldest), max(newest)) if oldest and newest else None,
        outcome=outcome,
        reason=reason,
    )


def outcome_of(fate: Fate) -> tuple[str, str]:
    """Return what became of a group, and why it was not trained."""
    if fate.step is not None:
        return "in batch", ""
    if fate.verdict is Outcome.DROP:
        return "dropped", fate.verdict_reason or ""
    if fate.verdict is Outcome.FAILED:
        return "failed", fate.verdict_reason or ""
    return ("closed", fate.closed) if fate.closed is not None else ("in no batch", "")
