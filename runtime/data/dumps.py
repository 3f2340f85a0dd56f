"""The content of a dump: a line per sample, and the segments of each group."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from messages import (
    ColumnPublished,
    GroupCompleted,
    Outcome,
    PackedArray,
    Prompt,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    with_untrained,
)
from runtime.settings.topology import TEACHER_LOG_PROBS

TOPK_COLUMNS: Final = {"teacher_topk_ids": "topk_ids", "teacher_topk_log_probs": "topk_log_probs"}  # of the teacher


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a completed group."""

    verdict: Outcome | None = None
    verdict_reason: str | None = None
    closed: str | None = None  # why the buffer closed it
    step: int | None = None  # train step of its batch


class DumpedSample(Fate, frozen=True, kw_only=True):
    """One line: a sample with the data of its group. Its tokens are in the columns."""

    group_id: int
    attempt: int
    index: int
    part: int = 0
    round: int
    data: str  # name of the data source
    prompt: str
    label: Any = None
    metadata: dict[str, Any] = {}  # of the prompt
    response: str
    segment_texts: tuple[str, ...] = ()  # if there are several segments
    reward: float | None = None
    score: dict[str, Any] | None = None
    rewards: dict[str, float] = {}  # by name, if the recipe trains several
    status: SampleStatus
    reason: str | None = None  # why it failed
    prompt_len: int = 0  # tokens
    response_len: int = 0
    first_version: int | None = None  # oldest and newest weight version
    last_version: int | None = None
    sample_metadata: dict[str, Any] = {}  # of this sample only
    rollout_time_s: float = 0.0
    reward_time_s: float = 0.0
    baseline_reward: float | None = None  # of the group's greedy sample, whose tokens are not dumped
    baseline_len: int = 0  # its response tokens


class DumpedGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A completed prompt group: its samples, and the segments of each."""

    samples: tuple[DumpedSample, ...]
    segments: tuple[tuple[Segment, ...], ...]
    columns: tuple[Mapping[str, PackedArray], ...] = ()  # by name, of each sample; empty: none has any

    @property
    def group_id(self) -> int:
        return self.samples[0].group_id

    @property
    def columns_of_samples(self) -> tuple[Mapping[str, PackedArray], ...]:
        """The columns of each sample by name."""
        none: Mapping[str, PackedArray] = {}
        return self.columns or (none,) * len(self.samples)

    def completed(self) -> GroupCompleted:
        """Rebuild its completion event from the dump. It cites no payloads."""
        first = self.samples[0]
        return GroupCompleted(
            group_id=first.group_id,
            attempt=first.attempt,
            lease="",
            round=first.round,
            instance="dump",
            data=first.data,
            samples=tuple(map(summary_of, self.samples)),
            baseline=baseline_of(self),
            metadata=first.metadata,
            rollout_time_s=first.rollout_time_s,
            reward_time_s=first.reward_time_s,
        )


def group_of(
    completed: GroupCompleted,
    payloads: Mapping[int, SegmentsPublished],
    fate: Fate,
    stored: Prompt | None = None,
    columns: Mapping[int, ColumnPublished] | None = None,
) -> DumpedGroup:
    """Make the dump content of a completed group.

    Args:
        payloads: all payloads that the event cites, by sequence.
        stored: its prompt, if that is stored separately.
        columns: all columns that the event cites, by sequence.

    Raises:
        ValueError: a reference points to another sample's segment.
    """
    segments = tuple(
        tuple(with_untrained(_segments(completed, sample, payloads), sample.untrained)) for sample in completed.samples
    )
    prompt = stored or next(iter(payloads.values()), None)
    text = prompt.text if isinstance(prompt, Prompt) else prompt.prompt if prompt else ""
    lines = [
        DumpedSample(
            **msgspec.structs.asdict(fate),
            group_id=completed.group_id,
            attempt=completed.attempt,
            index=sample.index,
            part=sample.part,
            round=completed.round,
            data=completed.data,
            prompt=text,
            label=prompt.label if prompt else None,
            metadata=stored.metadata if stored else completed.metadata,
            response="".join(segment.text for segment in own),
            segment_texts=tuple(segment.text for segment in own) if len(own) > 1 else (),
            reward=sample.reward,
            score=sample.score,
            rewards=sample.rewards,
            status=sample.status,
            reason=sample.reason,
            prompt_len=sample.prompt_len,
            response_len=sample.response_len,
            first_version=sample.first_version,
            last_version=sample.last_version,
            sample_metadata=sample.metadata,
            rollout_time_s=completed.rollout_time_s,
            reward_time_s=completed.reward_time_s,
            baseline_reward=completed.baseline.reward if completed.baseline else None,
            baseline_len=completed.baseline.response_len if completed.baseline else 0,
        )
        for sample, own in zip(completed.samples, segments, strict=True)
    ]
    of_samples = tuple(
        _columns({name: columns[seq] for name, seq in sample.columns.items()}) if columns else {}
        for sample in completed.samples
    )
    return DumpedGroup(samples=tuple(lines), segments=segments, columns=of_samples if any(of_samples) else ())


def summary_of(sample: DumpedSample) -> SampleSummary:
    """Return the summary of a sample, as in events."""
    return SampleSummary(
        index=sample.index,
        part=sample.part,
        status=sample.status,
        prompt_len=sample.prompt_len,
        response_len=sample.response_len,
        reward=sample.reward,
        score=sample.score,
        rewards=sample.rewards,
        first_version=sample.first_version,
        last_version=sample.last_version,
        reason=sample.reason,
        metadata=sample.sample_metadata,
    )


def baseline_of(group: DumpedGroup) -> SampleSummary | None:
    """Return the summary of a group's greedy sample, if it had one. It cites no tokens."""
    first = group.samples[0]
    if first.baseline_reward is None:
        return None
    return SampleSummary(
        index=1 + max(sample.index for sample in group.samples),
        status=SampleStatus.COMPLETED,
        prompt_len=first.prompt_len,
        response_len=first.baseline_len,
        reward=first.baseline_reward,
        is_baseline=True,
    )


def _segments(
    completed: GroupCompleted, sample: SampleSummary, payloads: Mapping[int, SegmentsPublished]
) -> Iterator[Segment]:
    for ref in sample.segments:
        segment = _cited(payloads, ref)
        key = segment.sample
        if (key.group_id, key.index, key.part) != (completed.group_id, sample.index, sample.part):
            raise ValueError(f"segment {ref.position} of message {ref.seq} belongs to {key}")
        yield segment


def _cited(payloads: Mapping[int, SegmentsPublished], ref: SegmentRef) -> Segment:
    segments = payloads[ref.seq].segments
    if ref.position >= len(segments):
        raise ValueError(f"message {ref.seq} has no segment {ref.position}")
    return segments[ref.position]


def _columns(messages: Mapping[str, ColumnPublished]) -> dict[str, PackedArray]:
    """Return the values of a sample's columns, and the likeliest tokens of its teacher under names of their own."""
    found: dict[str, PackedArray] = {name: message.values for name, message in messages.items()}
    teacher = messages.get(TEACHER_LOG_PROBS)
    if teacher is not None and teacher.topk_ids is not None and teacher.topk_log_probs is not None:
        found |= {name: getattr(teacher, field) for name, field in TOPK_COLUMNS.items()}
    return found


def columns_of_dump(columns: Mapping[str, PackedArray]) -> dict[str, dict[str, Any]]:
    """Return the fields of each `ColumnPublished` of a dumped sample, by the column's name."""
    found: dict[str, dict[str, Any]] = {
        name: {"values": values} for name, values in columns.items() if name not in TOPK_COLUMNS
    }
    if TEACHER_LOG_PROBS in found:
        found[TEACHER_LOG_PROBS] |= {field: columns[name] for name, field in TOPK_COLUMNS.items() if name in columns}
    return found
