"""The ledger: what the log says about every prompt group. Pure: no clock, no IO, no configuration.

The buffer decides by it; anyone who follows the log may fold it too.
"""

from collections.abc import Iterable
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
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
    RolloutRequested,
    RoundHalted,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentsSpilled,
    SnapshotTaken,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)
from messages.subjects import key_of
from runtime.ledger.changes import AttemptEnded, Batched, Change, Closed, Issued, Judged
from runtime.ledger.state import Books, EvalItem, Evaluation, Group, LedgerState, Stage
from runtime.ledger.steps import Batch, StepChange, StepEvent, TakenBack, advance

__all__ = [
    "FOLD_VERSION",
    "LEDGER_EVENTS",
    "Batch",
    "Books",
    "EvalItem",
    "Evaluation",
    "Group",
    "LedgerEvent",
    "LedgerState",
    "Stage",
    "fold",
    "longest",
    "spills_of",
]

FOLD_VERSION: Final = 4  # raised whenever the same log folds to another state; older snapshots are then not loaded

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
MAX_REASONS: Final = (
    256  # told apart, of groups that were dropped and of those that failed; a filter may word each anew
)
OTHER_REASONS: Final = "other reasons"
OVER_SAMPLING_FILTER: Final = "over_sampling_filter"  # reason of groups that lost the selection


def spills_of(state: LedgerState, group_id: int, attempt: int) -> tuple[SampleSummary, ...]:
    """What is stored of an attempt that has not ended; nothing of any other."""
    group = state.groups.get(group_id)
    if group is None or group.attempt != attempt or group.stage is not Stage.IN_FLIGHT:
        return ()
    return group.spilled


def longest(*summaries: Iterable[SampleSummary]) -> tuple[SampleSummary, ...]:
    """Of each sample the summary with the most tokens, in order; of equal ones the later."""
    best: dict[tuple[int, int], SampleSummary] = {}
    for samples in summaries:
        for sample in samples:
            key = sample.index, sample.part
            if key not in best or sample.response_len >= best[key].response_len:
                best[key] = sample
    return tuple(best[key] for key in sorted(best))


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
            return _end_attempt(state, event, seq)
        case VerdictGiven():
            return _judge(state, event)
        case GroupsIssued():
            return _issue(state, event)
        case SegmentsSpilled():
            _spill(state, event)
        case BatchReady():
            return _batch(state, event)
        case GroupsClosed():
            tally = state.failed if event.outcome == "failed" else state.dropped
            return tuple(change for each in event.group_ids for change in _close(state, each, tally, event.reason))
        case BatchTrained() | TrainerStarted() | CheckpointSaved() | PayloadsMissing():
            return _advance(state, event, seq)
        case MessageDeadLettered():
            return _lose_task(state, event)
        case EvalIssued() | EvalCompleted() | EvalEnded():
            _evaluate(state, event)
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
            state.finished, state.gave_up, state.barren = None, None, 0
        case SnapshotTaken():
            if event.fold_version == FOLD_VERSION:  # another one is of no use: one that is gets taken at once
                state.snapshot_step = state.checkpoint_step
        case RunFinished():
            state.finished = event.reason
        case RunFailed():
            state.gave_up = event.reason


def _announce(state: LedgerState, event: WeightsAnnounced) -> None:
    if event.version <= state.version:
        return
    state.version, state.version_step = event.version, event.step
    versions = [batch.oldest_version for batch in state.batches.values()]
    oldest = min([event.version, *versions, *(_oldest_version(group) for group in state.groups.values())])
    kept = {version: step for version, step in state.version_steps.items() if version >= oldest}
    state.version_steps = {**kept, event.version: event.step}


def _oldest_version(group: Group) -> int:
    return min(group.min_version, group.oldest_version or group.min_version)


def _issue(state: LedgerState, event: GroupsIssued) -> tuple[Change, ...]:
    groups: list[Group] = []
    for issued in event.groups:
        group = state.groups.get(issued.group_id)
        if issued.group_id >= state.next_group and not issued.attempt:
            state.first_group = state.first_group if state.next_group else issued.group_id
            group = Group(
                group_id=issued.group_id,
                attempt=issued.attempt,
                prompt=issued.prompt,
                round=event.round,
                min_version=event.min_version,
                stage=Stage.IN_FLIGHT,
                num_samples=event.num_samples,
                prompt_parts=issued.prompt_parts,
                payload_seq=min((state.newest_payload + 1, *issued.prompt_parts)),
            )
            state.newest_payload = max((state.newest_payload, *issued.prompt_parts))
            state.enter(group)
            state.next_group = issued.group_id + 1
            state.next_prompt = issued.prompt + 1
            groups.append(group)
        elif group is not None and group.stage is Stage.POOLED and issued.attempt > group.attempt:
            state.index.leave(group)
            group.attempt, group.round, group.min_version = issued.attempt, event.round, event.min_version
            group.num_samples, group.stage, group.reason = event.num_samples, Stage.IN_FLIGHT, None
            group.prompt_parts = issued.prompt_parts or group.prompt_parts
            group.payload_seq = min((group.payload_seq, *issued.prompt_parts))
            state.newest_payload = max((state.newest_payload, *issued.prompt_parts))
            state.index.enter(group)
            groups.append(group)
    return (Issued(tuple(groups)),)


def _end_attempt(
    state: LedgerState, event: GroupCompleted | GroupAborted | GroupFailed, seq: int
) -> tuple[Change, ...]:
    group = state.groups.get(event.group_id)
    if group is None or group.attempt != event.attempt or group.stage is not Stage.IN_FLIGHT:
        return ()  # a zombie's or a duplicate's late result
    ended = AttemptEnded(group, event)
    if isinstance(event, GroupFailed):
        return ended, *_close(state, event.group_id, state.failed, event.reason)
    completed = isinstance(event, GroupCompleted)
    samples = event.samples if completed else longest(group.spilled, event.samples)
    group.payload_seq = min(group.prompt_parts + _cited(state, samples), default=group.payload_seq)
    group.event_seq, group.spilled = seq, ()
    if completed and (reason := wrong_count(event, group.num_samples)):
        return ended, *_close(state, event.group_id, state.failed, reason)
    group.carried = () if completed else samples
    group.data = event.data if completed else group.data
    _describe(group, samples)
    state.move(group, Stage.COMPLETED if completed else Stage.POOLED)
    return (ended,)


def wrong_count(event: GroupCompleted, num_samples: int) -> str:
    """Why a completed group has not the samples that were asked for; empty if it has, or 0 says that it is unknown."""
    got = len({sample.index for sample in event.samples})
    return f"{got} samples where {num_samples} were asked for" if num_samples and got != num_samples else ""


def _lose_task(state: LedgerState, event: MessageDeadLettered) -> tuple[Change, ...]:
    """A task that nobody can read ends its attempt, or its item; put again it would be no better."""
    running, item = state.evaluation, (key_of(event.subject, EvalRequested) or "").split(".")
    if running is not None and len(item) == 3 and item[0] == str(running.step) and item[2].isdecimal():
        _end_item(running, item[1], int(item[2]), EvalItem(rewards=(), num_truncated=0))
    key = key_of(event.subject, RolloutRequested) or ""
    for group in state.in_stage(Stage.IN_FLIGHT).values():
        if key == f"{group.group_id}.{group.attempt}":
            return _close(state, group.group_id, state.failed, f"task: {event.reason}")
    return ()


def _cited(state: LedgerState, samples: Iterable[SampleSummary]) -> tuple[int, ...]:
    """The data messages that samples lie in."""
    cited = tuple(ref.seq for sample in samples for ref in sample.segments)
    state.newest_payload = max(state.newest_payload, max(cited, default=0))
    return cited


def _describe(group: Group, samples: tuple[SampleSummary, ...]) -> None:
    known = [(s.index, s.reward, s.response_len, s.first_version, s.last_version) for s in samples]
    indices, rewards, lens, oldest, newest = zip(*known, strict=True) if known else ((), (), (), (), ())
    group.indices, group.rewards, group.response_lens = indices, rewards, lens
    group.oldest_version = min([version for version in oldest if version is not None], default=None)
    group.newest_version = max([version for version in newest if version is not None], default=None)


def _spill(state: LedgerState, event: SegmentsSpilled) -> None:
    group = state.groups.get(event.group_id)
    if group is None or group.attempt != event.attempt or group.stage is not Stage.IN_FLIGHT:
        return
    group.spilled = longest(group.spilled, event.samples)
    group.payload_seq = min((group.payload_seq, *_cited(state, group.spilled)))


def _judge(state: LedgerState, event: VerdictGiven) -> tuple[Change, ...]:
    group = state.groups.get(event.group_id)
    if group is None or group.stage is not Stage.COMPLETED or group.event_seq != event.event_seq:
        return ()
    judged, reason = Judged(group, event.outcome, event.reason), event.reason or f"filter_{event.outcome}"
    match event.outcome:
        case Outcome.KEEP:
            state.move(group, Stage.READY)
        case Outcome.SPARE:
            group.reason = reason
            state.move(group, Stage.SPARE)
            _count_barren(state, group)
        case Outcome.DROP | Outcome.FAILED:
            tally = state.dropped if event.outcome is Outcome.DROP else state.failed
            return judged, *_close(state, event.group_id, tally, reason)
    return (judged,)


def _batch(state: LedgerState, event: BatchReady) -> tuple[Change, ...]:
    kept = tuple(ref for ref in event.groups if _is_kept(state, ref))
    if not kept or not state.takes_batch(event.step):
        return ()
    groups = tuple(state.groups[ref.group_id] for ref in kept if ref.group_id >= state.first_group)
    for group in groups:
        state.move(group, Stage.BATCHED)
    payload_seq = min((group.payload_seq for group in groups), default=state.newest_payload + 1)
    oldest = min(map(_oldest_version, groups), default=state.version)
    state.make(event.step, Batch(groups=kept, payload_seq=payload_seq, oldest_version=oldest))
    state.barren = 0
    return (Batched(event.step, groups, _pass_over(state, event)),)


def _pass_over(state: LedgerState, event: BatchReady) -> tuple[Group, ...]:
    """What a batch is made without and what waits for no other one."""
    passed_over = list(state.in_stage(Stage.SPARE).values())
    for group_id in event.passed_over:
        group = state.groups.get(group_id)
        if group is not None and group.stage is Stage.READY:
            group.reason = OVER_SAMPLING_FILTER
            passed_over.append(group)
    for group in passed_over:
        state.move(group, Stage.PASSED_OVER)
    return tuple(passed_over)


def _is_kept(state: LedgerState, ref: GroupRef) -> bool:
    """Whether a group can be in a batch now; one of before the log's beginning is taken at the buffer's word."""
    group = state.groups.get(ref.group_id)
    if group is None:
        return ref.group_id < state.first_group
    return group.stage in (Stage.READY, Stage.SPARE) and group.event_seq == ref.event_seq


def _advance(state: LedgerState, event: StepEvent, seq: int) -> tuple[StepChange, ...]:
    changes = advance(state, event)
    for change in changes:
        if isinstance(change, TakenBack):
            _give_back(state, change, seq)
        else:
            state.trained += sum(state.remove(ref.group_id) is not None for ref in change.groups)
    return changes


def _give_back(state: LedgerState, change: TakenBack, seq: int) -> None:
    """What is lost of a batch is generated again, the others wait for the next batch."""
    for ref in change.groups:
        group = state.groups.get(ref.group_id)
        if group is None:
            continue
        if ref in change.lost:
            _describe(group, ())
            group.event_seq, group.carried, group.payload_seq = seq, (), state.newest_payload + 1
            group.prompt_parts, group.reason = (), "payloads_missing"  # which may be gone too: it is stored again
            state.move(group, Stage.POOLED)
        else:
            state.move(group, Stage.READY)


def _close(state: LedgerState, group_id: int, tally: dict[str, int], reason: str) -> tuple[Change, ...]:
    group = state.remove(group_id)
    if group is None:
        return ()
    closed = Closed(group, reason)
    if reason not in tally and len(tally) >= MAX_REASONS:
        reason = OTHER_REASONS
    tally[reason] = tally.get(reason, 0) + 1
    if group.stage not in (Stage.SPARE, Stage.PASSED_OVER):  # those were counted, or had their chance
        _count_barren(state, group)
    return (closed,)


def _count_barren(state: LedgerState, group: Group) -> None:
    if group.round >= state.round:  # what a halted round leaves behind came with a batch
        state.barren += 1


def _evaluate(state: LedgerState, event: EvalIssued | EvalCompleted | EvalEnded) -> None:
    running = state.evaluation
    match event:
        case EvalIssued():
            if running is None and event.step > state.eval_step:
                sizes = {size.set: size.num_items for size in event.sets}
                items: dict[str, dict[int, EvalItem]] = {name: {} for name in sizes}
                state.evaluation = Evaluation(
                    step=event.step, version=event.version, sizes=sizes, items=items, payload_seq=event.payload_seq
                )
        case EvalCompleted():
            if running is not None and running.step == event.step:
                rewards = tuple(sample.reward or 0.0 for sample in event.samples)
                truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in event.samples)
                _end_item(running, event.set, event.item, EvalItem(rewards=rewards, num_truncated=truncated))
        case EvalEnded():
            if running is not None and running.step <= event.step:
                state.evaluation = None
            state.eval_step = max(state.eval_step, event.step)


def _end_item(running: Evaluation, name: str, item: int, ended: EvalItem) -> None:
    if 0 <= item < running.sizes.get(name, 0):
        running.items[name].setdefault(item, ended)
