"""Evaluations: when they are due, when training waits for them, and their metrics. Pure."""

import math
from collections.abc import Mapping

import msgspec

from messages import EvalEnded, EvalIssued, EvalSetSize
from runtime.ledger.fold import EvalItem, Evaluation, LedgerState
from runtime.util.pass_rate import pass_rates


class EvalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Schedule of one evaluation set."""

    name: str
    interval: int  # train steps
    num_items: int
    skip_before_train: bool = False
    keeps: bool = False  # whether a function computes metrics from its samples
    has_function: bool = False  # whether an evaluation function asks for its samples


def changed_function(state: LedgerState, plans: tuple[EvalPlan, ...], run: str) -> str | None:
    """Return why the running evaluation cannot go on: a set has gained or lost its function. None: it can."""
    running = state.evaluation
    for index, plan in enumerate(plans):
        had = None if running is None else running.has_function.get(plan.name)
        if running is None or had in (None, plan.has_function) or len(running.items[plan.name]) == plan.num_items:
            continue
        changed, resume = ("removed", "with it") if had else ("added", "without it")
        return (
            f"eval.{index}.custom_evaluation was {changed} in the middle of the evaluation of step {running.step} "
            f"(set {plan.name}), whose answers would be mixed: resume {resume} until that has ended, choose another "
            f"run.name, or start over with --fresh {run}"
        )
    return None


def end_of(state: LedgerState) -> EvalEnded | None:
    """The end of the running evaluation, once all its items are complete."""
    running = state.evaluation
    if running is None or not running.complete:
        return None
    items = [item for items in running.items.values() for item in items.values()]
    return EvalEnded(
        incarnation=state.incarnation,
        step=running.step,
        version=running.version,
        metrics=eval_metrics(running),
        newest_version=max((item.newest_version for item in items), default=0),
        failed=dict(running.failed),
        not_asked={name: number for name, each in running.items.items() if (number := _num_not_asked(each))},
    )


def issue_of(state: LedgerState, plans: tuple[EvalPlan, ...], num_steps: int) -> EvalIssued | None:
    """The evaluation of the newest weights, if one is due and no evaluation runs."""
    due = due_evals(state, plans, num_steps)
    if not due or state.evaluation is not None:
        return None
    sets = tuple(
        EvalSetSize(set=plan.name, num_items=plan.num_items, keeps=plan.keeps, has_function=plan.has_function)
        for plan in due
    )
    return EvalIssued(incarnation=state.incarnation, step=state.version_step, version=state.version, sets=sets)


def due_evals(state: LedgerState, plans: tuple[EvalPlan, ...], num_steps: int) -> list[EvalPlan]:
    """Evaluation sets due on the newest weights whose evaluation has not ended."""
    return [] if state.version_step <= state.eval_step else _due_at(state.version_step, plans, num_steps)


def issue_is_ahead(state: LedgerState, plans: tuple[EvalPlan, ...], num_steps: int, step: int) -> bool:
    """Whether an evaluation on weights of at most this train step is not issued yet.

    Training the step first would publish newer weights and update the engines before that evaluation.
    """
    running = state.evaluation is not None and state.evaluation.step == state.version_step
    if not running and due_evals(state, plans, num_steps):
        return True
    return any(_due_at(later, plans, num_steps) for later in range(state.version_step + 1, step + 1))


def _due_at(step: int, plans: tuple[EvalPlan, ...], num_steps: int) -> list[EvalPlan]:
    if step == 0:
        return [plan for plan in plans if not plan.skip_before_train]
    return [plan for plan in plans if step % plan.interval == 0 or step == num_steps]


def _num_not_asked(items: Mapping[int, EvalItem]) -> int:
    return sum(item.not_asked for item in items.values())


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Mean reward of each set, sample ratios, and pass@k (a reward of exactly 1 passes).

    Mean and pass@k leave out samples without a reward. A set without any reward has neither. A set whose evaluation
    function failed has no metric but the number of prompts of which it asked for no sample.

    The ratios: truncated samples and, if there are any, samples without a reward, and samples with tokens of newer
    weights than the evaluation's.

    Source:
        `pass_rates` has that of pass@k.
    """
    metrics: dict[str, float] = {}
    for name, items in evaluation.items.items():
        if num_not_asked := _num_not_asked(items):
            metrics[f"eval/{name}-not_asked"] = num_not_asked
        if name in evaluation.failed:
            continue
        rewards = [reward for item in items.values() for reward in item.rewards]
        num_ungraded = sum(item.num_ungraded for item in items.values())
        num_samples = len(rewards) + num_ungraded
        if not num_samples:
            continue
        if rewards:
            metrics[f"eval/{name}"] = math.fsum(rewards) / len(rewards)
        metrics[f"eval/{name}-truncated_ratio"] = sum(item.num_truncated for item in items.values()) / num_samples
        if num_ungraded:
            metrics[f"eval/{name}-ungraded_ratio"] = num_ungraded / num_samples
        if num_newer := sum(item.num_newer for item in items.values()):
            metrics[f"eval/{name}-newer_weights_ratio"] = num_newer / num_samples
        counts = [(len(item.rewards), item.rewards.count(1.0)) for item in items.values() if item.rewards]
        metrics |= {f"eval/{name}-pass@{k}": rate for k, rate in pass_rates(counts).items()}
    return metrics
