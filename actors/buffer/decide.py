"""What the buffer does next, from the ledger alone. Pure; called only when the log is folded to its end."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from messages import (
    BatchReady,
    EvalEnded,
    EvalIssued,
    EvalSetSize,
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
from runtime.ledger import FOLD_VERSION, Evaluation, Group, LedgerState, Stage


class EvalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """When one evaluation set is due."""

    name: str
    interval: int  # train steps
    num_items: int
    skip_before_train: bool = False


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the recipe that decisions need."""

    num_steps: int
    rollout_batch_size: int  # groups per train step
    over_sampling_batch_size: int  # groups per refill
    num_samples: int = 0  # of each group; 0: unknown
    max_staleness: int = 0  # train steps
    on_halt: Literal["resume", "restart", "drop"] = "resume"
    max_attempts: int = 5
    max_barren_groups: int = 1024  # dropped or failed in a row, without a batch in between, before the run is given up
    evals: tuple[EvalPlan, ...] = ()


def decide(state: LedgerState, schedule: Schedule) -> Message | None:
    """The next event to append to the ledger, or None while there is nothing to decide.

    One decision is outstanding at a time: call again after it was appended, read back and folded.
    """
    if state.finished is not None or state.gave_up is not None or state.version == 0:
        return None  # over, or no weights were announced yet
    for rule in (_snapshot, _end_eval, _issue_eval, _make_batch, _give_up, _halt, _close, _refill, _finish):
        decision = rule(state, schedule)
        if decision is not None:
            return decision
    return None


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Means over all samples of each set, the truncated share, and pass@k (a reward of exactly 1 passes).

    Source:
        pass@k is the unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv 2107.03374, for k = 1, 2, 4, ... <= n.
    """
    metrics: dict[str, float] = {}
    for name, items in evaluation.items.items():
        rewards = [reward for item in items.values() for reward in item.rewards]
        if not rewards:
            continue
        metrics[f"eval/{name}"] = math.fsum(rewards) / len(rewards)
        metrics[f"eval/{name}-truncated_ratio"] = sum(item.num_truncated for item in items.values()) / len(rewards)
        counts = [(len(item.rewards), item.rewards.count(1.0)) for item in items.values()]
        k, num_samples = 1, min(n for n, _ in counts)
        while 1 < num_samples and k <= num_samples:
            passed = [1 - math.comb(n - correct, k) / math.comb(n, k) for n, correct in counts]
            metrics[f"eval/{name}-pass@{k}"] = math.fsum(passed) / len(passed)
            k *= 2
    return metrics


def _snapshot(state: LedgerState, schedule: Schedule) -> Message | None:
    del schedule
    if state.checkpoint_step <= max(state.snapshot_step, 0):
        return None
    return SnapshotTaken(
        incarnation=state.incarnation,
        covers=state.last_seq,
        fold_version=FOLD_VERSION,
        state=msgspec.Raw(msgspec.json.encode(state)),
    )


def _end_eval(state: LedgerState, schedule: Schedule) -> Message | None:
    del schedule
    running = state.evaluation
    if running is None or not running.complete:
        return None
    return EvalEnded(
        incarnation=state.incarnation, step=running.step, version=running.version, metrics=eval_metrics(running)
    )


def _issue_eval(state: LedgerState, schedule: Schedule) -> Message | None:
    due = _due_evals(state, schedule)
    if not due or state.evaluation is not None:
        return None
    sets = tuple(EvalSetSize(set=plan.name, num_items=plan.num_items) for plan in due)
    return EvalIssued(incarnation=state.incarnation, step=state.version_step, version=state.version, sets=sets)


def _due_evals(state: LedgerState, schedule: Schedule) -> list[EvalPlan]:
    step = state.version_step
    if step <= state.eval_step:
        return []
    if step == 0:
        return [plan for plan in schedule.evals if not plan.skip_before_train]
    return [plan for plan in schedule.evals if step % plan.interval == 0 or step == schedule.num_steps]


def _make_batch(state: LedgerState, schedule: Schedule) -> Message | None:
    if not _round_open(state, schedule) or state.evaluation is not None:
        return None  # an evaluation holds the engines at its version: the next weights wait for it
    ready = sorted(_in_stage(state, Stage.READY), key=lambda group: group.event_seq)
    chosen = ready[: schedule.rollout_batch_size]
    if len(chosen) < schedule.rollout_batch_size:
        return None
    chosen.sort(key=lambda group: group.group_id)
    refs = tuple(GroupRef(group_id=g.group_id, attempt=g.attempt, event_seq=g.event_seq) for g in chosen)
    return BatchReady(incarnation=state.incarnation, step=state.round, groups=refs)


def _round_open(state: LedgerState, schedule: Schedule) -> bool:
    """Whether the newest weights are new enough for the open round."""
    return state.round < schedule.num_steps and state.version_step >= state.round - schedule.max_staleness


def _halt(state: LedgerState, schedule: Schedule) -> Message | None:
    del schedule
    running = [g.round for g in _in_stage(state, Stage.IN_FLIGHT) if state.halted_round < g.round < state.round]
    return RoundHalted(incarnation=state.incarnation, round=max(running)) if running else None


def _close(state: LedgerState, schedule: Schedule) -> Message | None:
    pooled = _in_stage(state, Stage.POOLED)
    if schedule.on_halt == "drop" and pooled:
        return _closed(state, pooled, "dropped", "halted")
    worn = [group for group in pooled if group.attempt + 1 >= schedule.max_attempts]
    return _closed(state, worn, "dropped", "max_attempts") if worn else None


def _closed(state: LedgerState, groups: Sequence[Group], outcome: str, reason: str) -> GroupsClosed:
    ids = tuple(group.group_id for group in groups)
    return GroupsClosed(incarnation=state.incarnation, group_ids=ids, outcome=outcome, reason=reason)


def _give_up(state: LedgerState, schedule: Schedule) -> Message | None:
    if state.barren < schedule.max_barren_groups:
        return None
    tallies = [*state.dropped.items(), *state.failed.items()]
    worst = ", ".join(f"{reason} ({count})" for reason, count in sorted(tallies, key=lambda item: -item[1])[:3])
    reason = f"{state.barren} prompt groups in a row were dropped or failed; most often: {worst}"
    return RunFailed(incarnation=state.incarnation, steps=state.trained_steps, reason=reason)


def _refill(state: LedgerState, schedule: Schedule) -> Message | None:
    if not _round_open(state, schedule):
        return None
    running = [g for g in _in_stage(state, Stage.IN_FLIGHT) if g.round > state.halted_round]
    held = len(running) + len(_in_stage(state, Stage.COMPLETED)) + len(_in_stage(state, Stage.READY))
    if held >= schedule.rollout_batch_size:
        return None
    pooled = _in_stage(state, Stage.POOLED)[: schedule.over_sampling_batch_size]
    issued = [IssuedGroup(group_id=g.group_id, attempt=g.attempt + 1, prompt=g.prompt) for g in pooled]
    issued += [
        IssuedGroup(group_id=state.next_group + i, attempt=0, prompt=state.next_prompt + i)
        for i in range(schedule.over_sampling_batch_size - len(pooled))
    ]
    return GroupsIssued(
        incarnation=state.incarnation,
        round=state.round,
        min_version=state.version,
        groups=tuple(issued),
        num_samples=schedule.num_samples,
    )


def _finish(state: LedgerState, schedule: Schedule) -> Message | None:
    trained = state.trained_steps >= schedule.num_steps
    saved = state.checkpoint_step >= schedule.num_steps
    waiting = state.evaluation is not None or _due_evals(state, schedule) or state.version_step < schedule.num_steps
    if not trained or not saved or waiting or state.books().in_flight:
        return None
    return RunFinished(incarnation=state.incarnation, steps=state.trained_steps, reason="all steps trained")


def _in_stage(state: LedgerState, stage: Stage) -> list[Group]:
    return list(state.in_stage(stage).values())
