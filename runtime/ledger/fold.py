"""The ledger: what the log says about every prompt group. Pure: no clock, no IO, no configuration.

The buffer decides by it; anyone who follows the log may fold it too. What events do to groups stands in groups.py, to
batches in batches.py and steps.py, to evaluations in evaluations.py.
"""

from typing import Final, cast

from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    PayloadsMissing,
    RolloutRequested,
    RoundHalted,
    RunFailed,
    RunFinished,
    SegmentsSpilled,
    SnapshotTaken,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)
from messages.subjects import key_of
from runtime.ledger.batches import take_batch, take_step
from runtime.ledger.changes import Change
from runtime.ledger.evaluations import evaluate, lose_ending_of_item, lose_item, note_same_weights
from runtime.ledger.groups import close, end_attempt, issue, judge, oldest_version, spill
from runtime.ledger.state import MAX_ENDINGS_LOST, Books, EvalItem, Evaluation, Group, LedgerState, Stage

__all__ = [
    "FOLD_VERSION",
    "LEDGER_EVENTS",
    "Books",
    "EvalItem",
    "Evaluation",
    "Group",
    "LedgerEvent",
    "LedgerState",
    "Stage",
    "fold",
]

FOLD_VERSION: Final = 12  # raised whenever the same log folds to another state; older snapshots are then not loaded

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
    | SegmentsSpilled
    | VerdictGiven
    | EvalCompleted
    | TrainerStarted
    | BatchTrained
    | PayloadsMissing
    | MessageDeadLettered
    | CheckpointSaved
    | WeightsAnnounced
)
LEDGER_EVENTS: tuple[type[Message], ...] = LedgerEvent.__args__
_FOLDED: Final = frozenset(LEDGER_EVENTS)


def fold(state: LedgerState, event: Message, seq: int) -> tuple[Change, ...]:
    """Change the state by one logged fact, in place. Anything stale or doubled leaves it as it was.

    Args:
        state: folded from all events before this one.
        event: a LedgerEvent.
        seq: its log sequence; an event at or below the last folded one is ignored.

    Returns:
        What it changed of groups and batches, in order.

    Raises:
        TypeError: the event is none that the ledger reads.
    """
    if type(event) not in _FOLDED:
        raise TypeError(f"the ledger does not fold {type(event).__name__}")
    if seq <= state.last_seq:
        return ()
    state.last_seq = seq
    return _apply(state, cast("LedgerEvent", event), seq)


def _apply(state: LedgerState, event: LedgerEvent, seq: int) -> tuple[Change, ...]:
    match event:
        case GroupCompleted() | GroupAborted() | GroupFailed():
            return end_attempt(state, event, seq)
        case VerdictGiven():
            return judge(state, event)
        case GroupsIssued():
            return issue(state, event)
        case SegmentsSpilled():
            spill(state, event)
        case BatchReady():
            return take_batch(state, event)
        case GroupsClosed():
            tally = state.failed if event.outcome == "failed" else state.dropped
            return tuple(change for each in event.group_ids for change in close(state, each, tally, event.reason))
        case BatchTrained() | TrainerStarted() | CheckpointSaved() | PayloadsMissing():
            return take_step(state, event, seq)
        case MessageDeadLettered():
            return _lose(state, event)
        case EvalIssued() | EvalCompleted() | EvalEnded():
            evaluate(state, event)
        case _:
            _note(state, event)
    return ()


def _note(
    state: LedgerState,
    event: RoundHalted | WeightsAnnounced | BufferStarted | SnapshotTaken | RunFinished | RunFailed,
) -> None:
    """What concerns no group."""
    match event:
        case RoundHalted():
            state.halted_round = max(state.halted_round, event.round)
        case WeightsAnnounced():
            _announce(state, event)
        case BufferStarted():
            state.incarnation = max(state.incarnation, event.incarnation)
            if state.gave_up is not None:  # a new try: only what is spare was dropped, as a spare counts, before it
                state.barren = len(state.in_stage(Stage.SPARE))
            state.finished, state.gave_up = None, None
        case SnapshotTaken():
            if event.fold_version == FOLD_VERSION:  # another one is of no use: one that is gets taken at once
                state.snapshot_step = state.checkpoint_step
        case RunFinished():
            state.finished = event.reason
        case RunFailed():
            state.gave_up = event.reason


def _announce(state: LedgerState, event: WeightsAnnounced) -> None:
    """Take up new weights. Those of a trainer that was replaced are not those that its successor trains."""
    if event.version <= state.version or state.is_replaced(event.incarnation):
        return
    state.version, state.version_step = event.version, event.step
    if state.evaluation is not None:
        note_same_weights(state.evaluation, event)
    versions = [batch.oldest_version for batch in state.batches.values()]
    oldest = min([event.version, *versions, *(oldest_version(group) for group in state.groups.values())])
    kept = {version: step for version, step in state.version_steps.items() if version >= oldest}
    state.version_steps = {**kept, event.version: event.step}


def _lose(state: LedgerState, event: MessageDeadLettered) -> tuple[Change, ...]:
    """A task that nobody can read ends its attempt, or its item; put again it would be no better.

    How an attempt or an item ended is asked for again, but not for ever: its writer may say it the same way each time.
    """
    running = state.evaluation
    if running is not None and (key := key_of(event.subject, EvalRequested)) is not None:
        lose_item(running, key)
    elif running is not None and (key := key_of(event.subject, EvalCompleted)) is not None:
        lose_ending_of_item(running, key)
    task = key_of(event.subject, RolloutRequested)
    keys = {task, *(key_of(event.subject, ending) for ending in (GroupCompleted, GroupAborted, GroupFailed))}
    for group in state.in_stage(Stage.IN_FLIGHT).values():
        if f"{group.group_id}.{group.attempt}" not in keys:
            continue
        if task is not None:
            return close(state, group.group_id, state.failed, f"task: {event.reason}")
        group.endings_lost += 1
        if group.endings_lost >= MAX_ENDINGS_LOST:
            return close(state, group.group_id, state.failed, f"ending: {event.reason}")
        break
    return ()
