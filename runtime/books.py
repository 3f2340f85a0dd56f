"""Where every issued prompt group is, told from the event log for people. The ledger decides by its own account."""

from enum import StrEnum

import msgspec

from messages import (
    BatchReady,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    SampleStatus,
    VerdictGiven,
)


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of prompt groups: issued is the sum of the others."""

    issued: int
    trained: int
    dropped: int
    failed: int
    pooled: int
    ready: int
    in_flight: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What a completed group adds to its step's numbers."""

    rewards: tuple[float, ...]
    response_lens: tuple[int, ...]  # tokens
    num_truncated: int
    rollout_time_s: float
    reward_time_s: float


class _Stage(StrEnum):
    IN_FLIGHT = "in_flight"
    COMPLETED = "completed"
    READY = "ready"
    POOLED = "pooled"


class _Live(msgspec.Struct):
    attempt: int
    stage: _Stage
    event_seq: int = 0
    group: Group | None = None


class Bookkeeper:
    """Folds events into books, and keeps the numbers of completed groups until their batch is trained."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}  # by reason
        self.failed: dict[str, int] = {}
        self._issued = 0
        self._trained = 0
        self._live: dict[int, _Live] = {}
        self._batches: dict[int, tuple[Group, ...]] = {}  # by step; not trained yet

    def apply(self, event: Message, seq: int) -> None:
        """Take one event of the log; those that say nothing about groups are passed over."""
        match event:
            case GroupsIssued():
                for issued in event.groups:
                    self._issued += issued.group_id not in self._live
                    self._live[issued.group_id] = _Live(issued.attempt, _Stage.IN_FLIGHT)
            case GroupCompleted() | GroupAborted() | GroupFailed():
                self._end_attempt(event, seq)
            case VerdictGiven():
                self._judge(event)
            case GroupsClosed():
                tally = self.failed if event.outcome == "failed" else self.dropped
                for group_id in event.group_ids:
                    self._close(group_id, tally, event.reason)
            case BatchReady():
                live = [self._live.get(ref.group_id) for ref in event.groups]
                groups = [(entry and entry.group) or _unknown_group for entry in live]
                self._batches[event.step] = tuple(groups)
                for ref in event.groups:
                    self._live.pop(ref.group_id, None)
            case _:
                pass

    def settle(self, step: int) -> tuple[Group, ...] | None:
        """The batch of a step is trained: hand out its groups; none if it was settled before."""
        groups = self._batches.pop(step, None)
        self._trained += len(groups or ())
        return groups

    def unsettled_below(self, step: int) -> list[int]:
        """Steps below this one whose batches are not known to be trained."""
        return sorted(waiting for waiting in self._batches if waiting < step)

    def books(self) -> Books:
        """Count every issued group once."""
        stages = [entry.stage for entry in self._live.values()]
        batched = sum(len(groups) for groups in self._batches.values())
        return Books(
            issued=self._issued,
            trained=self._trained,
            dropped=sum(self.dropped.values()),
            failed=sum(self.failed.values()),
            pooled=stages.count(_Stage.POOLED),
            ready=stages.count(_Stage.READY) + batched,
            in_flight=stages.count(_Stage.IN_FLIGHT) + stages.count(_Stage.COMPLETED),
        )

    def _end_attempt(self, event: GroupCompleted | GroupAborted | GroupFailed, seq: int) -> None:
        entry = self._live.get(event.group_id)
        if entry is None or entry.attempt != event.attempt or entry.stage is not _Stage.IN_FLIGHT:
            return  # late: its attempt had ended
        match event:
            case GroupFailed():
                self._close(event.group_id, self.failed, event.reason)
            case GroupAborted():
                entry.stage = _Stage.POOLED
            case GroupCompleted():
                entry.stage, entry.event_seq, entry.group = _Stage.COMPLETED, seq, _group_of(event)

    def _judge(self, event: VerdictGiven) -> None:
        entry = self._live.get(event.group_id)
        if entry is None or entry.stage is not _Stage.COMPLETED or entry.event_seq != event.event_seq:
            return
        if event.outcome is Outcome.KEEP:
            entry.stage = _Stage.READY
        else:
            tally = self.dropped if event.outcome is Outcome.DROP else self.failed
            self._close(event.group_id, tally, event.reason or f"filter_{event.outcome}")

    def _close(self, group_id: int, tally: dict[str, int], reason: str) -> None:
        if self._live.pop(group_id, None) is not None:
            tally[reason] = tally.get(reason, 0) + 1


_unknown_group = Group(rewards=(), response_lens=(), num_truncated=0, rollout_time_s=0.0, reward_time_s=0.0)


def _group_of(event: GroupCompleted) -> Group:
    samples = event.samples
    return Group(
        rewards=tuple(sample.reward for sample in samples if sample.reward is not None),
        response_lens=tuple(sample.response_len for sample in samples),
        num_truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in samples),
        rollout_time_s=event.rollout_time_s,
        reward_time_s=event.reward_time_s,
    )
