"""State changes of prompt groups in batches, and of an evaluation."""

from typing import Final

import msgspec

from messages import (
    BatchReady,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupRef,
    SampleStatus,
    SampleSummary,
    WeightsAnnounced,
)
from runtime.ledger.changes import Batched, Change
from runtime.ledger.groups import describe
from runtime.ledger.state import (
    MAX_ENDINGS_LOST,
    EvalItem,
    Evaluation,
    Group,
    LedgerState,
    Stage,
    in_log_order,
    oldest_version,
)
from runtime.ledger.steps import Batch, Settled, StepChange, StepEvent, TakenBack, advance

OVER_SAMPLING_FILTER: Final = "over_sampling_filter"  # reason of groups that the selection did not choose
KEPT_BYTES: Final = 16 << 10  # of the scores and metadata of an evaluation item's samples, as JSON


def take_batch(state: LedgerState, event: BatchReady) -> tuple[Change, ...]:
    """Put the kept groups of a batch into a step, once all its events are here."""
    batch = state.gather(event)
    if batch is None:
        return ()
    kept = tuple(ref for ref in batch.groups if _is_kept(state, ref))
    if not kept or not state.takes_batch(batch):
        return ()
    groups = tuple(state.groups[ref.group_id] for ref in kept if ref.group_id >= state.first_group)
    for group in groups:
        state.move(group, Stage.BATCHED)
    payload_seq = min((group.payload_seq for group in groups), default=state.newest_payload + 1)
    oldest = min(map(oldest_version, groups), default=state.version)
    is_next = event.step >= state.round
    state.make(event.step, Batch(groups=kept, payload_seq=payload_seq, oldest_version=oldest))
    if is_next:  # the groups of this batch's rounds that still run came too late
        state.rounds_ahead_before = state.rounds_ahead
    state.barren = 0
    return (Batched(event.step, groups, _pass_over(state, batch)),)


def _pass_over(state: LedgerState, event: BatchReady) -> tuple[Group, ...]:
    """Pass over the spare groups and those that the selection did not choose."""
    passed_over = in_log_order(state.in_stage(Stage.SPARE).values())
    for group_id in event.passed_over:
        group = state.groups.get(group_id)
        if group is not None and group.stage is Stage.READY:
            group.reason = OVER_SAMPLING_FILTER
            passed_over.append(group)
    for group in passed_over:
        state.move(group, Stage.PASSED_OVER)
    return tuple(passed_over)


def _is_kept(state: LedgerState, ref: GroupRef) -> bool:
    """Whether a group can be in a batch now. For groups older than the folded log, trusts the buffer."""
    group = state.groups.get(ref.group_id)
    if group is None:
        return ref.group_id < state.first_group
    return group.stage in (Stage.READY, Stage.SPARE) and group.event_seq == ref.event_seq


def take_step(state: LedgerState, event: StepEvent, seq: int) -> tuple[StepChange, ...]:
    """Apply an event of the trainer: settle groups of trained batches, give back groups of lost batches."""
    saved = state.checkpoint_step
    changes = advance(state, event)
    if state.checkpoint_step > saved:
        state.checkpoint_seq = seq
    state.snapshot_step = min(state.snapshot_step, state.checkpoint_step)
    for change in changes:
        if isinstance(change, TakenBack):
            _give_back(state, change, seq)
        else:
            _settle(state, change)
    return changes


def _settle(state: LedgerState, change: Settled) -> None:
    for ref in change.groups:
        if state.remove(ref.group_id) is None:
            continue
        if ref.group_id in change.skipped:
            state.skipped += 1
        else:
            state.trained += 1
    for item in change.untrained:
        state.untrained[item.reason] = state.untrained.get(item.reason, 0) + len(item.samples)


def _give_back(state: LedgerState, change: TakenBack, seq: int) -> None:
    """Release a batch's groups. Groups with lost payloads are generated again; the others wait for the next batch."""
    for ref in change.groups:
        group = state.groups.get(ref.group_id)
        if group is None:
            continue
        if ref in change.lost:
            describe(group, ())
            group.event_seq, group.carried = seq, ()
            group.payload_seq = min((state.newest_payload + 1, *group.draws))
            group.fruitless += 1
            group.prompt_parts, group.reason = (), "payloads_missing"  # the stored prompt may be gone too
            state.move(group, Stage.POOLED)
        else:
            state.move(group, Stage.READY)


def evaluate(state: LedgerState, event: EvalIssued | EvalCompleted | EvalEnded) -> None:
    """Start an evaluation, record one of its items, or end it."""
    running = state.evaluation
    match event:
        case EvalIssued():
            if running is None and event.step > state.eval_step:
                sizes = {size.set: size.num_items for size in event.sets}
                items: dict[str, dict[int, EvalItem]] = {name: {} for name in sizes}
                state.evaluation = Evaluation(
                    step=event.step,
                    version=event.version,
                    sizes=sizes,
                    items=items,
                    payload_seq=event.payload_seq,
                    kept=tuple(size.set for size in event.sets if size.keeps),
                    has_function={size.set: size.has_function for size in event.sets if size.has_function is not None},
                )
        case EvalCompleted():
            if running is not None and running.step == event.step:
                rewards = tuple(sample.reward for sample in event.samples if sample.reward is not None)
                truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in event.samples)
                own = max(running.version, running.same_until)
                newer = [v for sample in event.samples if (v := sample.last_version or 0) > own]
                kept, is_cut = _kept(event.samples) if event.set in running.kept else ((), False)
                if event.failed and len(running.items.get(event.set, ())) < running.sizes.get(event.set, 0):
                    running.failed.setdefault(event.set, event.failed)  # else another run of the function has counted
                ended = EvalItem(
                    rewards=rewards,
                    num_ungraded=0 if event.not_asked else max(len(event.samples), 1) - len(rewards),
                    num_truncated=truncated,
                    num_newer=len(newer),
                    newest_version=max(newer, default=0),
                    samples=kept,
                    is_cut=is_cut,
                    not_asked=event.not_asked,
                )
                end_item(running, event.set, event.item, ended)
        case EvalEnded():
            if running is not None and running.step <= event.step:
                state.evaluation = None
            state.eval_step = max(state.eval_step, event.step)


def _kept(samples: tuple[SampleSummary, ...]) -> tuple[tuple[SampleSummary, ...], bool]:
    """Return samples for a function of metrics, and whether their scores and metadata are left out as too large."""
    is_cut = len(msgspec.json.encode([(sample.score, sample.metadata) for sample in samples])) > KEPT_BYTES
    return tuple(
        SampleSummary(
            index=sample.index,
            part=sample.part,
            status=sample.status,
            response_len=sample.response_len,
            reward=sample.reward,
            score=None if is_cut else sample.score,
            metadata={} if is_cut else sample.metadata,
        )
        for sample in samples
    ), is_cut


def note_same_weights(running: Evaluation, event: WeightsAnnounced) -> None:
    """Treat a version that republishes the evaluation's weights as the evaluation's own."""
    if 0 < event.again_of <= running.version < event.version:
        running.same_until = event.version


def end_item(running: Evaluation, name: str, item: int, ended: EvalItem) -> None:
    """Record the result of an item; only the first result counts."""
    if 0 <= item < running.sizes.get(name, 0):
        running.items[name].setdefault(item, ended)


def lose_item(running: Evaluation, key: str) -> None:
    """End an item without rewards, because its task or its result cannot be decoded."""
    step, _, rest = key.partition(".")
    name, _, number = rest.rpartition(".")
    if step == str(running.step) and number.isdecimal():
        end_item(running, name, int(number), EvalItem(rewards=(), num_ungraded=1, num_truncated=0))


def lose_set(running: Evaluation, key: str) -> None:
    """End all open items of a set without rewards, because the task of its evaluation function cannot be decoded."""
    step, _, name = key.partition(".")
    if step == str(running.step) and name in running.sizes:
        running.failed.setdefault(name, "its task cannot be decoded")
        for item in range(running.sizes[name]):
            end_item(running, name, item, EvalItem(rewards=(), num_ungraded=1, num_truncated=0))


def lose_ending_of_item(running: Evaluation, key: str) -> None:
    """Count an undecodable result of an item. Its task is requeued until MAX_ENDINGS_LOST such results."""
    step, _, rest = key.partition(".")
    name, _, number = rest.rpartition(".")
    known = step == str(running.step) and number.isdecimal() and int(number) < running.sizes.get(name, 0)
    if known and int(number) not in running.items[name]:
        running.endings_lost[key] = running.endings_lost.get(key, 0) + 1
        if running.endings_lost[key] >= MAX_ENDINGS_LOST:
            lose_item(running, key)
