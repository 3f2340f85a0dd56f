"""The result of a run: one JSON line for programs, some lines for users. Pure."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from runtime.ledger.books import skipped_text, sum_line
from runtime.ledger.state import LedgerState
from runtime.util.formatting import count_of, duration, number, sparkline

ENDS = 5  # steps that are averaged for the first and the last reward, or half of them in a shorter run
REASONS_SHOWN = 10  # for dropped groups, and for failed ones

# a line of code, which is kept, and what differs between failures of one cause: quoted texts and numbers
_text = re.compile(r"""([\w./-]+\.py:\d+)|'[^']*'|"[^"]*"|\d+""")


def most_frequent(tally: Mapping[str, int]) -> list[str]:
    """Return the most frequent reasons with their counts, and how many more there are.

    Reasons count as one if they name the same exception, at the same line if they name one, whatever its text says.
    """
    merged: dict[str, tuple[str, int]] = {}
    for reason, count in tally.items():
        shape = _text.sub(lambda found: found[1] or "#", reason)
        first, before = merged.get(shape, (reason, 0))
        merged[shape] = first, before + count
    ordered = sorted(merged.values(), key=lambda item: (-item[1], item[0]))
    lines = [f"{count} {reason}" for reason, count in ordered[:REASONS_SHOWN]]
    rest = ordered[REASONS_SHOWN:]
    if rest:
        lines.append(f"{sum(count for _, count in rest)} for {count_of(len(rest), 'further reason')}")
    return lines


class KeptCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint of a run that can be loaded."""

    step: int  # train steps that it contains; 0: none can be loaded
    damages: tuple[str, ...] = ()  # path and damage of each newer checkpoint, newest first


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a run, for one JSON line. Losses are omitted if there are none."""

    run: str
    steps: int
    reward_first: float | None  # mean over the first 5 steps, or over half of them in a run of fewer than 10
    reward_last: float | None
    loss_first: float | None = None  # the same of the loss, when training on demonstrations
    loss_last: float | None = None
    eval_last: float | None  # newest mean of the first evaluation set
    seconds: float  # since the command started
    time_to_first_rollout_s: float | None
    tokens: int  # trained tokens, prompt and response
    groups: dict[str, int]
    checkpoint: KeptCheckpoint | None = None  # of a finished run, if its newest checkpoint is damaged or gone


def with_checkpoint(result: Result, kept: KeptCheckpoint | None, num_steps: int) -> Result:
    """Return the result of a finished run with its newest checkpoint, if that is not what the run saved last.

    Args:
        kept: the newest checkpoint that can be loaded; None: unknown.
        num_steps: planned train steps.
    """
    is_last = kept is None or (kept.step >= num_steps and not kept.damages)
    return msgspec.structs.replace(result, checkpoint=None if is_last else kept)


def checkpoint_lines(kept: KeptCheckpoint | None) -> list[str]:
    """Say which train step the result is of, if newer checkpoints are damaged or gone."""
    if kept is None:
        return []
    found = f"of step {kept.step}, the newest checkpoint that can be loaded" if kept.step else "no checkpoint is left"
    return [f"result    {found}", *(f"          {damage}" for damage in kept.damages)]


def num_of_end(values: Sequence[float]) -> int:
    """Return how many steps at each end of a curve are averaged: none is at both ends."""
    return max(1, min(ENDS, len(values) // 2))


def _ends_text(num_steps: int) -> str:
    """Say what the two numbers before a curve are."""
    num = num_of_end(range(num_steps))
    if num_steps == 1:
        return "the only step"
    return "first and last step" if num == 1 else f"means of the first and the last {num} steps"


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
            curve = curves[name]
            shown = number(ended) if len(curve) == 1 else f"{number(began)} → {number(ended)}"
            lines.append(f"{name:9} {shown}  {sparkline(curve)}  ({_ends_text(len(curve))})")
    lines += [
        f"eval      {number(began)} → {number(ended)}  {name} (first and newest evaluation)"
        for name, (began, ended) in evals.items()
    ]
    lines.append(f"groups    {sum_line(ledger.books())}")
    for what, tally in (("dropped", ledger.dropped), ("failed", ledger.failed)):
        lines += [f"          {what}: {text}" for text in most_frequent(tally)]
    lines += [f"          {skipped_text(reason, count)}" for reason, count in sorted(ledger.untrained.items())]
    return lines
