"""A log that is written by hand, the state that it folds to, and what is decided on it."""

from typing import Any

from actors.buffer.deciding.decide import Schedule, decide
from messages import (
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    Message,
    Outcome,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.ledger.fold import LedgerState, fold


class Log:
    """A log and the state that it folds to; decisions are appended until there are none."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"num_steps": 3, "rollout_batch_size": 2, "over_sampling_batch_size": 2}
        self.schedule = Schedule(**{**defaults, **settings})
        self.events: list[Message] = []
        self.state = LedgerState()

    def add(self, event: Message) -> int:
        self.events.append(event)
        fold(self.state, event, len(self.events))
        return len(self.events)

    def decide(self) -> list[Message]:
        made: list[Message] = []
        while (decision := decide(self.state, self.schedule)) is not None:
            made.append(decision)
            self.add(decision)
            assert len(made) < 100, "decides without end"
        return made

    def announce(self, step: int) -> None:
        self.add(announced(self.state.version + 1, step))

    def complete(self, group_id: int, reward: float = 1.0, verdict: Outcome = Outcome.KEEP) -> None:
        seq = self.add(completed(group_id, self.state.groups[group_id].attempt, reward=reward))
        self.add(judged(group_id, self.state.groups[group_id].attempt, seq, verdict))

    def train(self, step: int) -> None:
        self.add(trained(step))
        self.announce(step + 1)


def announced(version: int, step: int) -> WeightsAnnounced:
    return WeightsAnnounced(version=version, step=step, incarnation=1, path="", checksum="", size_bytes=0)


def summary(seq: int, reward: float | None = 1.0, status: SampleStatus = SampleStatus.COMPLETED) -> SampleSummary:
    return SampleSummary(index=0, status=status, segments=(SegmentRef(seq=seq, position=0),), reward=reward)


def completed(group_id: int, attempt: int, *, payload: int = 1, reward: float = 1.0) -> GroupCompleted:
    return GroupCompleted(
        group_id=group_id,
        attempt=attempt,
        lease="l",
        round=0,
        instance="rollout",
        data="d",
        samples=(summary(payload, reward),),
    )


def aborted(group_id: int, attempt: int, *, payload: int = 1) -> GroupAborted:
    sample = summary(payload, None, SampleStatus.ABORTED)
    return GroupAborted(group_id=group_id, attempt=attempt, lease="l", round=0, instance="rollout", samples=(sample,))


def judged(group_id: int, attempt: int, seq: int, outcome: Outcome = Outcome.KEEP) -> VerdictGiven:
    return VerdictGiven(group_id=group_id, attempt=attempt, event_seq=seq, outcome=outcome, reason=None)


def trained(step: int) -> BatchTrained:
    return BatchTrained(step=step, incarnation=1, num_groups=2, num_samples=2, num_tokens=2, metrics={})


def saved(step: int, oldest: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, incarnation=1, path="", oldest_step=oldest, took_s=0)


def kinds(events: list[Message]) -> list[type[Message]]:
    return [type(event) for event in events]
