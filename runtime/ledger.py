"""The ledger: what the log says about every prompt group. Pure: no clock, no IO, no configuration.

The buffer decides by it; anyone who follows the log may fold it too.
"""

from enum import StrEnum
from typing import assert_never

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    RoundHalted,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SnapshotTaken,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)

FOLD_VERSION = 2  # raised whenever the same log folds to another state; older snapshots are then not loaded

LedgerEvent = (
    BufferStarted
    | GroupsIssued
    | RoundHalted
    | BatchReady
    | GroupsClosed
    | EvalIssued
    | EvalEnded
    | SnapshotTaken
    | RunFinished
    | RunFailed
    | GroupCompleted
    | GroupAborted
    | GroupFailed
    | VerdictGiven
    | EvalCompleted
    | TrainerStarted
    | BatchTrained
    | CheckpointSaved
    | WeightsAnnounced
)
LEDGER_EVENTS: tuple[type[Message], ...] = LedgerEvent.__args__


class Stage(StrEnum):
    """Where a live group stands. Groups that ended are only counted."""

    IN_FLIGHT = "in_flight"  # issued, not ended
    COMPLETED = "completed"  # ended, waiting for its verdict
    READY = "ready"  # kept, waiting for a batch
    BATCHED = "batched"  # in a batch that is not trained yet
    POOLED = "pooled"  # halted with what it had, to be issued again


class Group(msgspec.Struct, kw_only=True):
    """A live prompt group."""

    group_id: int
    attempt: int
    prompt: int  # number in the order of the data source
    round: int
    min_version: int
    stage: Stage
    event_seq: int = 0  # log sequence of the event that ended this attempt
    carried: tuple[SampleSummary, ...] = ()  # what earlier attempts left
    payload_seq: int  # no data message below this one is needed by it; while in flight, a bound on what it will store


class Batch(msgspec.Struct, kw_only=True):
    """A batch that a loadable checkpoint does not contain yet."""

    groups: tuple[GroupRef, ...]
    payload_seq: int  # no data message below this one is needed by it
    trained: bool = False


class EvalItem(msgspec.Struct, kw_only=True, frozen=True):
    """Outcome of one evaluation item."""

    rewards: tuple[float, ...]
    num_truncated: int


class Evaluation(msgspec.Struct, kw_only=True):
    """An evaluation that runs."""

    step: int
    version: int
    sizes: dict[str, int]
    items: dict[str, dict[int, EvalItem]]

    @property
    def complete(self) -> bool:
        return all(len(self.items[name]) == size for name, size in self.sizes.items())


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Every issued group, by where it is. They close: issued is the sum of the others."""

    issued: int
    trained: int
    dropped: int
    failed: int
    pooled: int
    ready: int  # kept; in a batch or waiting for one
    in_flight: int

    @property
    def closed(self) -> bool:
        ended = self.trained + self.dropped + self.failed
        return self.issued == ended + self.pooled + self.ready + self.in_flight


class LedgerState(msgspec.Struct, kw_only=True):
    """What the log folds to."""

    last_seq: int = 0  # log sequence folded last
    ledger_seq: int = 0  # the same among the buffer's own events
    incarnation: int = 0  # of the buffer that owns the ledger
    next_group: int = 0
    next_prompt: int = 0
    groups: dict[int, Group] = {}  # live ones, in order of issue
    trained: int = 0
    dropped: dict[str, int] = {}  # by reason
    failed: dict[str, int] = {}
    newest_payload: int = 0  # highest data message that any folded event cites
    round: int = 0  # open round = number of the next batch
    halted_round: int = -1  # newest round that was halted
    batches: dict[int, Batch] = {}  # by step
    trained_steps: int = 0  # frontier: steps of which the log says that they are trained
    trainer_incarnation: int = 0
    version: int = 0  # newest announced weights, 0 before the first
    version_step: int = 0  # train steps that they contain
    checkpoint_step: int = 0
    snapshot_step: int = -1  # checkpoint step at the newest snapshot
    evaluation: Evaluation | None = None
    eval_step: int = -1  # newest step that was evaluated
    barren: int = 0  # groups of the open round that were dropped or failed
    finished: str | None = None  # reason; like the next one, until a buffer starts again: it may have more to do
    gave_up: str | None = None  # reason

    def books(self) -> Books:
        """Count every issued group once."""
        stages = [group.stage for group in self.groups.values()]
        return Books(
            issued=self.next_group,
            trained=self.trained,
            dropped=sum(self.dropped.values()),
            failed=sum(self.failed.values()),
            pooled=stages.count(Stage.POOLED),
            ready=stages.count(Stage.READY) + stages.count(Stage.BATCHED),
            in_flight=stages.count(Stage.IN_FLIGHT) + stages.count(Stage.COMPLETED),
        )

    def low_water(self) -> int:
        """No data message below this one is needed by a live group or a batch that no loadable checkpoint contains."""
        needed = [group.payload_seq for group in self.groups.values()]
        needed += [batch.payload_seq for batch in self.batches.values()]
        return min(needed, default=self.newest_payload + 1)


def fold(state: LedgerState, event: Message, seq: int) -> None:
    """Change the state by one logged fact, in place. Anything stale or doubled leaves it as it was.

    Args:
        state: folded from all events before this one.
        event: a LedgerEvent.
        seq: its log sequence; an event at or below the last folded one is ignored.

    Raises:
        TypeError: the event is none that the ledger reads.
    """
    if not isinstance(event, LedgerEvent):
        raise TypeError(f"the ledger does not fold {type(event).__name__}")
    if seq <= state.last_seq:
        return
    state.last_seq = seq
    if event.topic.startswith("ledger."):
        state.ledger_seq = seq
    _apply(state, event, seq)


def _apply(state: LedgerState, event: LedgerEvent, seq: int) -> None:
    match event:
        case GroupsIssued():
            _issue(state, event)
        case GroupCompleted() | GroupAborted() | GroupFailed():
            _end_attempt(state, event, seq)
        case VerdictGiven():
            _judge(state, event)
        case BatchReady():
            _batch(state, event)
        case GroupsClosed():
            for group_id in event.group_ids:
                _close(state, group_id, state.failed if event.outcome == "failed" else state.dropped, event.reason)
        case RoundHalted():
            state.halted_round = max(state.halted_round, event.round)
        case BatchTrained():
            _settle(state, event.step)
        case TrainerStarted():
            state.trainer_incarnation = max(state.trainer_incarnation, event.incarnation)
            for step in [step for step in state.batches if step < event.step]:
                _settle(state, step)
        case CheckpointSaved():
            state.checkpoint_step = max(state.checkpoint_step, event.step)
            for step in [step for step in state.batches if step < event.oldest_step]:
                _settle(state, step)
                del state.batches[step]
        case WeightsAnnounced():
            if event.version > state.version:
                state.version, state.version_step = event.version, event.step
        case EvalIssued() | EvalCompleted() | EvalEnded():
            _evaluate(state, event)
        case BufferStarted():
            state.incarnation = max(state.incarnation, event.incarnation)
            state.finished, state.gave_up, state.barren = None, None, 0
        case SnapshotTaken():
            state.snapshot_step = state.checkpoint_step
        case RunFinished():
            state.finished = event.reason
        case RunFailed():
            state.gave_up = event.reason
        case _:
            assert_never(event)


def _issue(state: LedgerState, event: GroupsIssued) -> None:
    for issued in event.groups:
        group = state.groups.get(issued.group_id)
        if issued.group_id >= state.next_group:
            state.groups[issued.group_id] = Group(
                group_id=issued.group_id,
                attempt=issued.attempt,
                prompt=issued.prompt,
                round=event.round,
                min_version=event.min_version,
                stage=Stage.IN_FLIGHT,
                payload_seq=state.newest_payload + 1,
            )
            state.next_group = issued.group_id + 1
            state.next_prompt = issued.prompt + 1
        elif group is not None and group.stage is Stage.POOLED and issued.attempt > group.attempt:
            group.attempt, group.round, group.min_version = issued.attempt, event.round, event.min_version
            group.stage = Stage.IN_FLIGHT


def _end_attempt(state: LedgerState, event: GroupCompleted | GroupAborted | GroupFailed, seq: int) -> None:
    group = state.groups.get(event.group_id)
    if group is None or group.attempt != event.attempt or group.stage is not Stage.IN_FLIGHT:
        return  # a zombie's or a duplicate's late result
    if isinstance(event, GroupFailed):
        _close(state, event.group_id, state.failed, event.reason)
        return
    group.event_seq = seq
    cited = [ref.seq for sample in event.samples for ref in sample.segments]
    group.payload_seq = min(cited, default=group.payload_seq)
    state.newest_payload = max([state.newest_payload, *cited])
    if isinstance(event, GroupCompleted):
        group.stage, group.carried = Stage.COMPLETED, ()
    else:
        group.stage, group.carried = Stage.POOLED, event.samples


def _judge(state: LedgerState, event: VerdictGiven) -> None:
    group = state.groups.get(event.group_id)
    if group is None or group.stage is not Stage.COMPLETED or group.event_seq != event.event_seq:
        return
    if event.outcome is Outcome.KEEP:
        group.stage = Stage.READY
    else:
        tally = state.dropped if event.outcome is Outcome.DROP else state.failed
        _close(state, event.group_id, tally, event.reason or f"filter_{event.outcome}")


def _batch(state: LedgerState, event: BatchReady) -> None:
    kept = tuple(ref for ref in event.groups if _is_kept(state, ref))
    if not kept or event.step < state.round:
        return
    groups = [state.groups[ref.group_id] for ref in kept]
    for group in groups:
        group.stage = Stage.BATCHED
    state.batches[event.step] = Batch(groups=kept, payload_seq=min(group.payload_seq for group in groups))
    state.round, state.barren = event.step + 1, 0


def _is_kept(state: LedgerState, ref: GroupRef) -> bool:
    group = state.groups.get(ref.group_id)
    return group is not None and group.stage is Stage.READY and group.event_seq == ref.event_seq


def _settle(state: LedgerState, step: int) -> None:
    batch = state.batches.get(step)
    state.trained_steps = max(state.trained_steps, step + 1)
    if batch is None or batch.trained:
        return  # trained again after a crash, or unknown below an old checkpoint
    batch.trained = True
    for ref in batch.groups:
        if state.groups.pop(ref.group_id, None) is not None:
            state.trained += 1


def _close(state: LedgerState, group_id: int, tally: dict[str, int], reason: str) -> None:
    group = state.groups.pop(group_id, None)
    if group is None:
        return
    tally[reason] = tally.get(reason, 0) + 1
    if group.round >= state.round:  # what a halted round leaves behind came with a batch
        state.barren += 1


def _evaluate(state: LedgerState, event: EvalIssued | EvalCompleted | EvalEnded) -> None:
    running = state.evaluation
    match event:
        case EvalIssued():
            if running is None and event.step > state.eval_step:
                sizes = {size.set: size.num_items for size in event.sets}
                items: dict[str, dict[int, EvalItem]] = {name: {} for name in sizes}
                state.evaluation = Evaluation(step=event.step, version=event.version, sizes=sizes, items=items)
        case EvalCompleted():
            size = running.sizes.get(event.set, 0) if running is not None and running.step == event.step else 0
            if running is not None and 0 <= event.item < size:
                rewards = tuple(sample.reward or 0.0 for sample in event.samples)
                truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in event.samples)
                item = EvalItem(rewards=rewards, num_truncated=truncated)
                running.items[event.set].setdefault(event.item, item)
        case EvalEnded():
            if running is not None and running.step <= event.step:
                state.evaluation = None
            state.eval_step = max(state.eval_step, event.step)
