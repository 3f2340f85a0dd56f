"""Events of a run's log, with defaults for what a test does not name."""

from typing import Any

from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsIssued,
    IssuedGroup,
    Outcome,
    SampleStatus,
    SampleSummary,
    SnapshotTaken,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.ledger.fold import FOLD_VERSION, LedgerState
from runtime.ledger.snapshots import pack_state, with_content
from tests.build.samples import filled, summary


def of_an_attempt(fields: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Fields of an attempt's end, with defaults."""
    return {"lease": "lease", "round": 0, "instance": "rollout", **others, **fields}


def issued(*group_ids: int, attempt: int = 0, **fields: Any) -> GroupsIssued:
    """Groups that the buffer issues, each with the prompt of its own number."""
    groups = tuple(IssuedGroup(group_id=group_id, attempt=attempt, prompt=group_id) for group_id in group_ids)
    return GroupsIssued(**filled(fields, incarnation=1, round=0, min_version=1), groups=groups)


def completed(
    group_id: int = 0,
    attempt: int = 0,
    *,
    payload: int = 1,
    reward: float = 1.0,
    samples: tuple[SampleSummary, ...] | None = None,
    **fields: Any,
) -> GroupCompleted:
    """An attempt that ended with scored samples.

    Args:
        group_id: of the group.
        attempt: counted from 0.
        payload: sequence of the message with the segment of its one sample, where `samples` are not given.
        reward: of that sample.
        samples: all of its samples.
        fields: others of the message.
    """
    one = (summary(0, (payload, 0), reward=reward),)
    done = one if samples is None else samples
    return GroupCompleted(**of_an_attempt(fields, data="d"), group_id=group_id, attempt=attempt, samples=done)


def aborted(
    group_id: int,
    attempt: int = 0,
    *,
    payload: int = 1,
    samples: tuple[SampleSummary, ...] | None = None,
    **fields: Any,
) -> GroupAborted:
    """An attempt that a halt ended: by default with one unfinished sample, whose segment is the first of `payload`."""
    one = (summary(0, (payload, 0), reward=None, status=SampleStatus.ABORTED),)
    left = one if samples is None else samples
    return GroupAborted(**of_an_attempt(fields), group_id=group_id, attempt=attempt, samples=left)


def failed(group_id: int, reason: str = "test", *, attempt: int = 0, **fields: Any) -> GroupFailed:
    """An attempt that cannot succeed."""
    return GroupFailed(**of_an_attempt(fields), group_id=group_id, attempt=attempt, reason=reason)


def verdict(group_id: int, event_seq: int, outcome: Outcome = Outcome.KEEP, **fields: Any) -> VerdictGiven:
    """The filter's verdict on the completion at a sequence of the log."""
    return VerdictGiven(**filled(fields, attempt=0), group_id=group_id, event_seq=event_seq, outcome=outcome)


def batch(step: int, *refs: tuple[int, int] | tuple[int, int, int], **fields: Any) -> BatchReady:
    """The batch of a train step.

    Args:
        step: counted from 0.
        refs: (group, sequence of its completion) or (group, attempt, sequence) of each group; (group, seq): attempt 0.
        fields: others of the message.
    """
    groups = tuple(GroupRef(group_id=ref[0], attempt=ref[1] if len(ref) == 3 else 0, event_seq=ref[-1]) for ref in refs)
    return BatchReady(**filled(fields, incarnation=1), step=step, groups=groups)


def trained(step: int, **fields: Any) -> BatchTrained:
    """A train step that is done."""
    return BatchTrained(
        **filled(fields, incarnation=1, num_groups=2, num_samples=2, num_tokens=2, metrics={}), step=step
    )


def announced(version: int, step: int = 0, **fields: Any) -> WeightsAnnounced:
    """A weight version that the trainer publishes; nothing lies at its path."""
    told = filled(fields, incarnation=1, path=f"/weights/v{version}", checksum="sum", size_bytes=1)
    return WeightsAnnounced(**told, version=version, step=step)


def saved(step: int, oldest: int = 0, **fields: Any) -> CheckpointSaved:
    """A complete checkpoint."""
    return CheckpointSaved(**filled(fields, incarnation=1, path="", took_s=0.0), step=step, oldest_step=oldest)


def snapshot(state: LedgerState, *, fold_version: int = FOLD_VERSION, incarnation: int = 1) -> SnapshotTaken:
    """A snapshot with its state inside."""
    event = SnapshotTaken(incarnation=incarnation, covers=state.last_seq, fold_version=fold_version)
    return with_content(event, pack_state(state))
