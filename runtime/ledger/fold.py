"""The ledger: the state of every prompt group, folded from the log. Pure: no clock, no IO, no configuration.

The buffer decides on this state, and any other reader of the log can fold it too. groups.py changes groups, steps.py
batches, and batches.py the groups in batches and evaluations.
"""

from collections.abc import Iterator
from typing import Final, cast

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    EvalSetRequested,
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
from runtime.ledger.batches import (
    evaluate,
    lose_ending_of_item,
    lose_item,
    lose_set,
    note_same_weights,
    take_batch,
    take_step,
)
from runtime.ledger.changes import Change
from runtime.ledger.groups import close, end_attempt, issue, judge, note_outcomes, set_verdicts, spill
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
    "fold_in_parts",
    "in_flight",
]

FOLD_VERSION: Final = 24  # raised when the same log folds to another state; older snapshots are then ignored

PART: Final = 512  # groups of an issue that are folded at a time, in about 2 ms
MAX_DIGITS: Final = 20  # of a group id in a subject

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
    """Apply one logged event to the state, in place. A stale or duplicate event changes nothing.

    Args:
        state: folded from all events before this one.
        event: a LedgerEvent.
        seq: its log sequence; an event at or below the last folded one is ignored.

    Returns:
        Changes of groups and batches, in order.

    Raises:
        TypeError: the event is not a LedgerEvent.
    """
    if type(event) not in _FOLDED:
        raise TypeError(f"the ledger does not fold {type(event).__name__}")
    if seq <= state.last_seq:
        return ()
    state.last_seq = seq
    changes = _apply(state, cast("LedgerEvent", event), seq)
    if state.tells_source:
        note_outcomes(state, changes)
    return changes


def fold_in_parts(state: LedgerState, event: Message, seq: int) -> Iterator[None]:
    """Apply one logged event as `fold` does, an issue of many groups in parts.

    Between them the caller may do other work, but neither decide nor fold another event.
    """
    if isinstance(event, GroupsIssued) and seq > state.last_seq:
        for start in range(0, len(event.groups) - PART, PART):
            issue(state, msgspec.structs.replace(event, groups=event.groups[start : start + PART]))
            yield
        event = msgspec.structs.replace(event, groups=event.groups[-1 - (len(event.groups) - 1) % PART :])
    fold(state, event, seq)


def _apply(state: LedgerState, event: LedgerEvent, seq: int) -> tuple[Change, ...]:
    match event:
        case GroupCompleted() | GroupAborted() | GroupFailed():
            return end_attempt(state, event, seq)
        case VerdictGiven():
            return judge(state, event)
        case GroupsIssued() | RunFinished() | RunFailed() if event.incarnation < state.incarnation:
            return ()  # of a replaced buffer, stored again; other decisions of it have no effect anyway
        case GroupsIssued():
            return issue(state, event)
        case BufferStarted():
            return _start(state, event)
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


def _start(state: LedgerState, event: BufferStarted) -> tuple[Change, ...]:
    """Begin a buffer's incarnation. Its recipe may have gained or lost a filter."""
    if event.incarnation <= state.incarnation:
        return ()
    state.incarnation = event.incarnation
    if state.gave_up is not None:  # after a restart, only spare groups still count as barren
        state.barren = len(state.in_stage(Stage.SPARE))
    state.finished, state.gave_up = None, None
    state.tells_source = event.tells_source
    state.outcomes = state.outcomes if event.tells_source else ()
    return set_verdicts(state, needed=event.verdicts)


def _note(
    state: LedgerState,
    event: RoundHalted | WeightsAnnounced | SnapshotTaken | RunFinished | RunFailed,
) -> None:
    """Apply an event that concerns no group."""
    match event:
        case RoundHalted():
            if event.by_hand and event.round >= state.first_round:
                state.ended_by_hand = max(state.ended_by_hand, event.round)
                state.rounds_ahead = max(state.rounds_ahead, event.round + 1 - state.round)
            state.halted_round = max(state.halted_round, event.round)
        case WeightsAnnounced():
            _announce(state, event)
        case SnapshotTaken():
            # else it is unusable or older than the checkpoint: the buffer takes a new snapshot
            if event.fold_version == FOLD_VERSION and event.covers >= state.checkpoint_seq:
                state.snapshot_step = state.checkpoint_step
        case RunFinished():
            state.finished = event.reason
        case RunFailed():
            state.gave_up = event.reason


def _announce(state: LedgerState, event: WeightsAnnounced) -> None:
    """Record new weights, unless a replaced trainer announced them: its successor trains other weights."""
    if event.version <= state.version or state.is_replaced(event):
        return
    state.version, state.version_step = event.version, event.step
    if state.evaluation is not None:
        note_same_weights(state.evaluation, event)
    versions = [batch.oldest_version for batch in state.batches.values()]
    oldest = min([event.version, *versions, *state.index.versions])
    kept = {version: step for version, step in state.version_steps.items() if version >= oldest}
    state.version_steps = {**kept, event.version: event.step}


def _lose(state: LedgerState, event: MessageDeadLettered) -> tuple[Change, ...]:
    """End the attempt or evaluation item of an undecodable task. Requeuing the same task would not help.

    An undecodable ending is requested again, up to MAX_ENDINGS_LOST times: its writer may write the same each time.
    """
    running = state.evaluation
    if running is not None and (key := key_of(event.subject, EvalRequested)) is not None:
        lose_item(running, key)
    elif running is not None and (key := key_of(event.subject, EvalSetRequested)) is not None:
        lose_set(running, key)
    elif running is not None and (key := key_of(event.subject, EvalCompleted)) is not None:
        lose_ending_of_item(running, key)
    task = key_of(event.subject, RolloutRequested)
    keys = {task, *(key_of(event.subject, ending) for ending in (GroupCompleted, GroupAborted, GroupFailed))}
    for key in filter(None, keys):
        group = in_flight(state, key)
        if group is None:
            continue
        if task is not None:
            return close(state, group.group_id, state.failed, f"task: {event.reason}")
        group.endings_lost += 1
        if group.endings_lost >= MAX_ENDINGS_LOST:
            return close(state, group.group_id, state.failed, f"ending: {event.reason}")
        break
    return ()


def in_flight(state: LedgerState, key: str) -> Group | None:
    """The group in flight whose task or ending has this key."""
    group_id = key.partition(".")[0]
    group = state.groups.get(int(group_id)) if group_id.isdecimal() and len(group_id) < MAX_DIGITS else None
    if group is None or group.stage is not Stage.IN_FLIGHT or f"{group.group_id}.{group.attempt}" != key:
        return None
    return group
