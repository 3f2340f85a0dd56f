"""The buffer's next decision, computed from the ledger alone. Pure; called only when the whole log is folded."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from actors.buffer.deciding.evaluation import EvalPlan, due_evals, end_of, eval_metrics, issue_is_ahead, issue_of
from actors.buffer.deciding.selection import BUILT_IN, Chosen, Kind, Selection, summary_of
from messages import (
    BatchReady,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Message,
    RoundHalted,
    RunFailed,
    RunFinished,
    SnapshotTaken,
)
from runtime.ledger.fold import FOLD_VERSION, Group, LedgerState, Stage
from runtime.ledger.groups import HALTED
from runtime.ledger.state import in_log_order

__all__ = ["EvalPlan", "Schedule", "decide", "eval_metrics"]

MAX_CLOSED = 512  # groups closed by one event: it is folded at once; further events close the rest
MAX_ISSUED = 4096  # groups issued by one event, whose size the bus limits; further events issue the rest
MAX_BATCHED = 4096  # groups of a batch in one event, and as many that it passes over
POOLED_REFILLS = 4  # size of the pool, in over-sampling batches; the oldest groups beyond it are closed
POOLED_ROUNDS = 8  # rounds that a group may stay in the pool: its payloads keep newer ones from being purged


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the recipe that decisions need."""

    num_steps: int
    rollout_batch_size: int  # groups per train step
    over_sampling_batch_size: int  # groups per refill
    num_samples: int = 0  # samples per group; 0: unknown
    refill: Literal["batch", "group"] = "batch"
    over_sampling_filter: str | None = None
    buffer_filter: str = "fifo"
    keep_when_insufficient: bool = False
    max_staleness: int = 0  # train steps
    max_token_staleness: int | None = None  # train steps; groups with older tokens are dropped
    halts: bool = True  # halt a round once its batch is made; otherwise its groups run to their ends
    on_halt: Literal["resume", "restart", "drop"] = "resume"
    on_surplus: Literal["train", "drop"] = "train"
    max_attempts: int = 5
    max_barren_groups: int = 1024  # groups dropped or failed in a row, without a batch, before the run fails
    evals: tuple[EvalPlan, ...] = ()
    eval_overlap: bool = True


def decide(
    state: LedgerState, schedule: Schedule, chosen: Chosen | None = None, *, snapshots: bool = True
) -> Message | Selection | None:
    """The next event to append to the ledger, or None while there is nothing to decide.

    One decision is outstanding at a time: call again after the event was appended, read back and folded. A Selection
    is a question to a user's function: call again with its answer before any other event is folded.

    Args:
        state: the ledger, folded to the end of the log.
        schedule: the part of the recipe that decisions need.
        chosen: the answer to the previous Selection.
        snapshots: whether a snapshot may be taken; False while the state fits neither into an event nor into chunks.
    """
    if state.finished is not None or state.gave_up is not None or state.version == 0:
        return None  # the run is over, or no weights are published yet
    return (
        (_snapshot(state) if snapshots else None)
        or end_of(state)
        or issue_of(state, schedule.evals, schedule.num_steps)
        or _close_passed_over(state, schedule)
        or _close_surplus(state, schedule)
        or _make_batch(state, schedule, chosen)
        or _give_up(state, schedule)
        or _halt(state, schedule)
        or _close_pooled(state, schedule)
        or _refill(state, schedule, chosen)
        or _finish(state, schedule)
    )


def _snapshot(state: LedgerState) -> Message | None:
    return snapshot_of(state) if state.checkpoint_step > max(state.snapshot_step, 0) else None


def snapshot_of(state: LedgerState) -> SnapshotTaken:
    """A snapshot of the ledger, without the state: it is stored before the event is appended."""
    return SnapshotTaken(incarnation=state.incarnation, covers=state.last_seq, fold_version=FOLD_VERSION)


def _make_batch(state: LedgerState, schedule: Schedule, chosen: Chosen | None) -> Message | Selection | None:
    ready, step = state.in_stage(Stage.READY), _open_step(state, schedule)
    if step is None or not _can_fill(state, schedule):
        return None
    target = _target(state, schedule)
    if (len(ready) < target and not _exhausted(state, schedule)) or _waits_for_evaluation(state, schedule, step):
        return None
    at_hand = [*ready.values(), *(state.in_stage(Stage.SPARE).values() if len(ready) < target else ())]
    stale = [group for group in at_hand if _too_old(state, schedule, group, step)]
    if stale:
        return _closed(state, stale, "stale")
    size = schedule.rollout_batch_size
    candidates = in_log_order(ready.values())[: max(target, size)]
    if len(candidates) < size:
        newest_first = in_log_order(state.in_stage(Stage.SPARE).values())[::-1]
        return _batch(state, step, [*candidates, *newest_first][:size])
    if schedule.over_sampling_filter is None or state.taken_back or len(candidates) == size:
        return _batch(state, step, candidates[:size])
    order = _select("over_sampling_filter", schedule.over_sampling_filter, candidates, size, chosen)
    if isinstance(order, Selection):
        return order
    best = set(order[:size])
    passed_over = [group.group_id for group in candidates if group.group_id not in best]
    return _batch(state, step, [group for group in candidates if group.group_id in best], passed_over)


def _batch(state: LedgerState, step: int, groups: Sequence[Group], passed_over: Iterable[int] = ()) -> BatchReady:
    refs = tuple(
        GroupRef(group_id=group.group_id, attempt=group.attempt, event_seq=group.event_seq)
        for group in sorted(groups, key=lambda group: group.group_id)
    )
    return BatchReady(incarnation=state.incarnation, step=step, groups=refs, passed_over=tuple(passed_over))


def events_of(batch: BatchReady) -> list[BatchReady]:
    """Split a batch into events, to be appended one after another without another decision between them."""
    size = max(len(batch.groups), len(batch.passed_over))
    starts = range(0, max(size, 1), MAX_BATCHED)
    return [
        msgspec.structs.replace(
            batch,
            groups=batch.groups[start : start + MAX_BATCHED],
            passed_over=batch.passed_over[start : start + MAX_BATCHED],
            index=index,
            num_events=len(starts),
        )
        for index, start in enumerate(starts)
    ]


def _open_step(state: LedgerState, schedule: Schedule) -> int | None:
    """The next step without a batch, if the newest weights are new enough for it."""
    step = state.taken_back[0] if state.taken_back else state.round
    return step if step < schedule.num_steps and state.version_step >= step - schedule.max_staleness else None


def _target(state: LedgerState, schedule: Schedule) -> int:
    """Number of ready groups needed to make a batch. A rebuilt batch does not over-sample: it keeps its groups."""
    if schedule.over_sampling_filter is None or state.taken_back:
        return schedule.rollout_batch_size
    return schedule.over_sampling_batch_size


def _can_fill(state: LedgerState, schedule: Schedule) -> bool:
    """Whether there are enough groups for a batch; spare groups count once max_barren_groups is reached."""
    num_groups = len(state.in_stage(Stage.READY))
    if schedule.keep_when_insufficient and _exhausted(state, schedule):
        num_groups += len(state.in_stage(Stage.SPARE))
    return num_groups >= schedule.rollout_batch_size


def _exhausted(state: LedgerState, schedule: Schedule) -> bool:
    return state.barren >= schedule.max_barren_groups


def _waits_for_evaluation(state: LedgerState, schedule: Schedule, step: int) -> bool:
    if state.evaluation is not None and not (schedule.max_staleness and schedule.eval_overlap):
        return True  # the engines stay at its version: the next weights wait for it
    return issue_is_ahead(state, schedule.evals, schedule.num_steps, step)


def _too_old(state: LedgerState, schedule: Schedule, group: Group, step: int) -> bool:
    if schedule.max_token_staleness is None or group.oldest_version is None:
        return False
    sampled_by = state.version_steps.get(group.oldest_version)
    return sampled_by is not None and step - sampled_by > schedule.max_token_staleness


def _select(
    kind: Kind, name: str, groups: Sequence[Group], count: int, chosen: Chosen | None
) -> Sequence[int] | Selection:
    """Group ids in order of preference, or the question to the user's function."""
    built_in = BUILT_IN[kind].get(name)
    if built_in is not None:
        return built_in(groups)
    if chosen is not None and chosen.kind == kind:
        return chosen.group_ids
    return Selection(kind=kind, groups=tuple(summary_of(group) for group in groups), count=count)


def _halt(state: LedgerState, schedule: Schedule) -> Message | None:
    over = state.round >= schedule.num_steps and not state.taken_back
    made = state.first_round if schedule.halts else 0
    running = [round for round in state.index.rounds if state.halted_round < round and (over or round < made)]
    return RoundHalted(incarnation=state.incarnation, round=max(running)) if running else None


def halt_by_hand(state: LedgerState) -> RoundHalted | None:
    """The halt of the newest round with groups in flight, for a person; None if there is no such round.

    Its groups end as at any other halt, and are issued again, in the next round, for the same batch. If its batch is
    made already, it is an ordinary halt: the next round has not begun.
    """
    running = [round for round in state.index.rounds if round > state.halted_round]
    if not running or state.finished is not None or state.gave_up is not None:
        return None
    newest = max(running)
    return RoundHalted(incarnation=state.incarnation, round=newest, by_hand=newest >= state.first_round)


def _close_passed_over(state: LedgerState, schedule: Schedule) -> Message | None:
    passed_over, spares = state.in_stage(Stage.PASSED_OVER), state.in_stage(Stage.SPARE)
    excess = len(spares) - schedule.over_sampling_batch_size
    if not passed_over and excess <= 0:
        return None
    ended = in_log_order(passed_over.values()) or in_log_order(spares.values())[:excess]
    reason = ended[0].reason
    return _closed(state, [group for group in ended if group.reason == reason], reason or "passed_over")


def _close_surplus(state: LedgerState, schedule: Schedule) -> Message | None:
    """Drop groups of earlier rounds that no batch took (on_surplus = "drop"): their tokens come from older weights."""
    if schedule.on_surplus == "train" or state.taken_back:  # a rebuilt batch needs its groups
        return None
    kept = (*state.in_stage(Stage.READY).values(), *state.in_stage(Stage.SPARE).values())
    surplus = [group for group in kept if group.round < state.first_round]
    return _closed(state, surplus, "surplus") if surplus else None


def _close_pooled(state: LedgerState, schedule: Schedule) -> Message | None:
    pooled = state.in_stage(Stage.POOLED)
    if schedule.on_halt == "drop" and pooled:
        halted = [group for group in pooled.values() if group.reason is None]
        if halted:
            return _closed(state, halted, HALTED)
    if any(fruitless >= schedule.max_attempts for fruitless in state.index.fruitless):
        worn = [group for group in pooled.values() if group.fruitless >= schedule.max_attempts]
        return _closed(state, worn, "max_attempts")
    least = state.first_round - schedule.max_staleness - POOLED_ROUNDS
    left = [group for group in pooled.values() if group.round < least and group.reason is None] if least > 0 else ()
    if left:
        return _closed(state, left, "left_in_pool")
    excess = len(pooled) - POOLED_REFILLS * schedule.over_sampling_batch_size
    if excess > 0:
        return _closed(state, [pooled[group_id] for group_id in sorted(pooled)[:excess]], "pool_full")
    return None


def _closed(state: LedgerState, groups: Iterable[Group], reason: str) -> GroupsClosed:
    ids = tuple(group.group_id for group in in_log_order(groups)[:MAX_CLOSED])
    return GroupsClosed(incarnation=state.incarnation, group_ids=ids, outcome="dropped", reason=reason)


def _give_up(state: LedgerState, schedule: Schedule) -> Message | None:
    spares = len(state.in_stage(Stage.SPARE)) if schedule.keep_when_insufficient else 0
    if state.barren - spares < schedule.max_barren_groups or _can_fill(state, schedule):
        return None
    tallies = [*state.dropped.items(), *state.failed.items()]
    worst = ", ".join(f"{reason} ({count})" for reason, count in sorted(tallies, key=lambda item: -item[1])[:3])
    reason = f"{state.barren} prompt groups in a row were dropped or failed; most often: {worst}"
    return RunFailed(incarnation=state.incarnation, steps=state.trained_steps, reason=reason)


def _refill(state: LedgerState, schedule: Schedule, chosen: Chosen | None) -> Message | Selection | None:
    if _open_step(state, schedule) is None or (state.evaluation is not None and not schedule.eval_overlap):
        return None
    if state.num_halting:
        return None  # they go on before new groups begin
    round = state.open_round
    num_missing = _num_missing(state, schedule, round)
    number = min(num_missing, MAX_ISSUED)
    if number <= 0:
        return None
    pooled = state.in_stage(Stage.POOLED)
    again: Sequence[int] | Selection = ()
    if pooled:
        in_order = [pooled[group_id] for group_id in sorted(pooled)]
        again = _select("buffer_filter", schedule.buffer_filter, in_order, number, chosen)
    if isinstance(again, Selection):
        return again
    first = [pooled[group_id] for group_id in again[:number]]
    issued = [IssuedGroup(group_id=g.group_id, attempt=g.attempt + 1, prompt=g.prompt) for g in first]
    issued += [
        IssuedGroup(group_id=state.next_group + i, attempt=0, prompt=state.next_prompt + i)
        for i in range(number - len(first))
    ]
    return GroupsIssued(
        incarnation=state.incarnation,
        round=round,
        min_version=state.version,
        groups=tuple(issued),
        num_samples=schedule.num_samples,
        verdicts=state.verdicts,
        more=num_missing - number,
    )


def _num_missing(state: LedgerState, schedule: Schedule, round: int) -> int:
    """Number of groups to issue now, by one event or several."""
    running = sum(count for round, count in state.index.rounds.items() if round > state.halted_round)
    held = running + len(state.in_stage(Stage.COMPLETED)) + len(state.in_stage(Stage.READY))
    if _exhausted(state, schedule) and _can_fill(state, schedule):
        return 0  # the batch has its groups and waits for something else
    if state.taken_back:
        return schedule.rollout_batch_size - held
    if schedule.refill == "group":
        return schedule.over_sampling_batch_size - held
    if state.to_issue and state.issue_round == round:
        return state.to_issue
    return schedule.over_sampling_batch_size if held < _target(state, schedule) else 0


def _finish(state: LedgerState, schedule: Schedule) -> Message | None:
    trained = state.trained_steps >= schedule.num_steps
    saved = state.checkpoint_step >= schedule.num_steps
    if not trained or not saved or state.evaluation is not None or state.version_step < schedule.num_steps:
        return None
    if due_evals(state, schedule.evals, schedule.num_steps) or state.books().in_flight:
        return None
    return RunFinished(incarnation=state.incarnation, steps=state.trained_steps, reason="all steps trained")
