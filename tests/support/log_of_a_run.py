"""A small run told as events, by hand."""

from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    EvalIssued,
    EvalSetSize,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Message,
    Outcome,
    RoundHalted,
    RunFinished,
    SampleStatus,
    SampleSummary,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)

SAMPLE = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
INSTANCE = "rollout.policy.0"


def issued(*group_ids: int, attempt: int = 0, round: int = 0) -> GroupsIssued:
    groups = tuple(IssuedGroup(group_id=group_id, attempt=attempt, prompt=group_id) for group_id in group_ids)
    return GroupsIssued(incarnation=1, round=round, min_version=1, groups=groups)


def completed(group_id: int, attempt: int = 0) -> GroupCompleted:
    return GroupCompleted(
        group_id=group_id, attempt=attempt, lease="l", round=0, instance=INSTANCE, data="d", samples=(SAMPLE,)
    )


def aborted(group_id: int) -> GroupAborted:
    return GroupAborted(group_id=group_id, attempt=0, lease="l", round=0, instance=INSTANCE)


def failed(group_id: int, reason: str) -> GroupFailed:
    return GroupFailed(group_id=group_id, attempt=0, lease="l", round=0, instance=INSTANCE, reason=reason)


def verdict(
    group_id: int, event_seq: int, outcome: Outcome = Outcome.KEEP, attempt: int = 0, reason: str | None = None
) -> VerdictGiven:
    return VerdictGiven(group_id=group_id, attempt=attempt, event_seq=event_seq, outcome=outcome, reason=reason)


def batch(step: int, **refs: int) -> BatchReady:
    """Groups by g<id>=<sequence of its completion>, at the first attempt but for group 3, which has two."""
    groups = tuple(
        GroupRef(group_id=int(name[1:]), attempt=int(name == "g3"), event_seq=seq) for name, seq in refs.items()
    )
    return BatchReady(incarnation=1, step=step, groups=groups)


def trained(step: int, *, incarnation: int = 1, replay: bool = False) -> BatchTrained:
    return BatchTrained(
        step=step, incarnation=incarnation, replay=replay, num_groups=2, num_samples=2, num_tokens=9, metrics={}
    )


def weights(version: int, step: int, *, incarnation: int = 1) -> WeightsAnnounced:
    return WeightsAnnounced(version=version, step=step, incarnation=incarnation, path="w", checksum="c", size_bytes=1)


# Eight groups. Step 0 trains 0 and 1; 2 is dropped, 3 aborted and issued again, 4 fails. The trainer dies after it has
# trained step 1 (groups 3 and 5) and saved it, before it says so. Group 6 is closed, 7 stays in flight.
LOG: tuple[Message, ...] = (
    BufferStarted(incarnation=1),  # 1
    weights(1, 0),
    issued(0, 1, 2, 3, 4),
    completed(0),
    verdict(0, 4),
    completed(1),  # 6
    completed(2),
    verdict(2, 7, Outcome.DROP, reason="zero_std"),
    verdict(1, 6),
    batch(0, g0=4, g1=6),
    RoundHalted(incarnation=1, round=0),  # 11
    aborted(3),
    failed(4, "no score"),
    trained(0),
    weights(2, 1),
    issued(3, attempt=1, round=1),  # 16
    issued(5, 6, 7, round=1),
    completed(3, attempt=1),
    completed(3),  # a late result of the first attempt
    verdict(3, 18, attempt=1),
    completed(5),  # 21
    verdict(5, 21),
    batch(1, g3=18, g5=21),
    GroupsClosed(incarnation=1, group_ids=(6,), outcome="dropped", reason="too_stale"),
    CheckpointSaved(step=2, incarnation=1, path="c", oldest_step=0, took_s=0.1),
    TrainerStarted(incarnation=2, step=2),  # 26
    weights(3, 2, incarnation=2),
    EvalIssued(incarnation=1, step=2, version=3, sets=(EvalSetSize(set="heldout", num_items=2),)),
    EvalCompleted(step=2, set="heldout", item=0, version=3, instance=INSTANCE, samples=(SAMPLE,)),
)
THE_END = RunFinished(incarnation=1, steps=2, reason="trained 2 steps")
