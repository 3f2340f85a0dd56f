"""The result of a run: one JSON line for programs, some lines for users. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from runtime.ledger.books import skipped_text, sum_line
from runtime.ledger.state import LedgerState
from runtime.util.formatting import duration, number, sparkline

REASONS_SHOWN = 10  # for dropped groups, and for failed ones


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a run, for one JSON line. Losses are omitted if there are none."""

    run: str
    steps: int
    reward_first: float | None  # mean over the first 5 steps
    reward_last: float | None
    loss_first: float | None = None  # the same of the loss, when training on demonstrations
    loss_last: float | None = None
    eval_last: float | None  # newest mean of the first evaluation set
    seconds: float  # since the command started
    time_to_first_rollout_s: float | None
    tokens: int  # trained tokens, prompt and response
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
    """Format the result as lines.

    Args:
        num_steps: planned train steps.
        earlier_steps: train steps before this command.
        curves: mean reward and loss by step.
        evals: first and newest mean reward by set.
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
    lines += [f"          {skipped_text(reason, count)}" for reason, count in sorted(ledger.untrained.items())]
    return lines
