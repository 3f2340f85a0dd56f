"""The outcome of a run: one JSON line for programs, a few lines for people. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from runtime.ledger.books import sum_line, untrained_words
from runtime.ledger.state import LedgerState
from runtime.wording import duration, number, sparkline

REASONS_SHOWN = 10  # of groups that were dropped, and of those that failed


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a run in one JSON line; the losses are left out where there are none."""

    run: str
    steps: int
    reward_first: float | None  # mean over the first 5 steps of their mean rewards
    reward_last: float | None
    loss_first: float | None = None  # the same of the loss where demonstrations are trained, which have no reward
    loss_last: float | None = None
    eval_last: float | None  # newest mean of the first evaluation set
    seconds: float  # since the command was given
    time_to_first_rollout_s: float | None
    tokens: int  # prompt and response, trained
    groups: dict[str, int]


def summary_lines(
    result: Result,
    ledger: LedgerState,
    *,
    num_steps: int,
    earlier_steps: int,
    curves: Mapping[str, Sequence[float]],
    evals: Mapping[str, tuple[float, float]],
) -> list[str]:
    """The outcome for people.

    Args:
        num_steps: planned ones.
        earlier_steps: of the trained ones, those before the command was given.
        curves: mean reward and loss by step.
        evals: first and newest mean by set.
    """
    first = result.time_to_first_rollout_s
    new = f", {result.steps - earlier_steps} of them" if earlier_steps else ""
    lines = [
        f"steps     {result.steps} of {num_steps}{new} in {duration(result.seconds)}"
        + (f", first rollout after {first:.1f} s" if first is not None else "")
    ]
    ends = {"reward": (result.reward_first, result.reward_last), "loss": (result.loss_first, result.loss_last)}
    for name, (began, ended) in ends.items():
        if began is not None and ended is not None:
            lines.append(f"{name:9} {number(began)} → {number(ended)}  {sparkline(curves[name])}")
    lines += [f"eval      {number(began)} → {number(ended)}  {name}" for name, (began, ended) in evals.items()]
    lines.append(f"groups    {sum_line(ledger.books())}")
    for what, tally in (("dropped", ledger.dropped), ("failed", ledger.failed)):
        lines += [f"          {what}: {count} {reason}" for reason, count in sorted(tally.items())[:REASONS_SHOWN]]
    lines += [f"          {untrained_words(reason, count)}" for reason, count in sorted(ledger.untrained.items())]
    return lines
