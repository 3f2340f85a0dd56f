"""The account of a run's time as lines, among them the progress line, and as metrics of a step. Pure."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from messages import BatchTrained, Message
from runtime.ledger.state import Evaluation, LedgerState, Stage
from runtime.report.fold.account import Account
from runtime.report.rows import MetricRow
from runtime.util.formatting import count_of, duration

SMALL: Final = 0.01  # share of the whole, of parts that the closing line adds up
KINDS: Final = {  # of the account's steps, as wall time
    "step": "steps that count",
    "replay": "steps trained again",
    "lost": "work lost by a stop of the run",
    "start": "starts of the run",
    "end": "after the last step",
}
RESTARTS: Final = "processes down or starting in steps"
SINCE: Final = "since the newest step"


def shares(account: Account) -> list[tuple[str, float, float]]:
    """Return the parts of the run's time with their seconds and their shares of the whole, longest first."""
    whole = math.fsum(account.totals.values())
    ordered = sorted(account.totals.items(), key=lambda item: -item[1])
    return [(part, seconds, seconds / whole) for part, seconds in ordered if whole > 0]


def _head(account: Account) -> str:
    """Say how long the run took, and a step of it."""
    mean = f", {account.timed_s / account.num_timed:.3f} s a step" if account.num_timed else ""
    return f"{duration(math.fsum(account.totals.values()))} in {count_of(account.num_steps, 'step')}{mean}"


def time_lines(account: Account) -> list[str]:
    """Format the time of a run, one part a line, longest first, with what was worst in its worst step."""
    parts = shares(account)
    if not parts:
        return ["no step has ended yet"]
    lines = [_head(account)]
    for part, seconds, share in parts:
        worst = max(account.steps, key=lambda step: step.parts.get(part, 0.0), default=None)
        most = worst.parts.get(part, 0.0) if worst is not None else 0.0
        name = worst.worst.get(part, "") if worst is not None else ""
        where = f"  most in {worst.label}: {most:.3f} s{f', {name}' if name else ''}" if worst and most else ""
        lines.append(f"{part:<12} {seconds:>10.3f} s {share:>6.1%}{where}")
    if parts[0][0] == "queue":
        lines.append("queue is the longest: all slots of the engines are taken, so the engines are the limit")
    if account.stopped_s:
        lines.append(f"the run was stopped for {duration(account.stopped_s)}, which is not counted")
    return lines


def closing_line(account: Account) -> list[str]:
    """Format the same in one line, small parts as one; none before a step has ended."""
    found = shares(account)
    small = [(seconds, share) for _, seconds, share in found if share < SMALL]
    rest = [("other", math.fsum(s for s, _ in small), math.fsum(share for _, share in small))] if small else []
    shown = [*(each for each in found if each[2] >= SMALL), *rest]
    parts = [f"{part} {seconds:.3f} s ({share:.1%})" for part, seconds, share in shown]
    return [f"time      {_head(account)}: {', '.join(parts)}"] if account.num_timed else []


class WallTime:
    """Where the wall time of a run went, from its first event to its newest, by what counts for its weights.

    `steps that count` is the effective training time: all of a step that was trained for the first time, but the time
    that its processes were down or still starting.
    """

    def __init__(self) -> None:
        self.account = Account()
        self._seconds: Counter[str] = Counter()
        self._newest = 0.0  # Unix time of the latest event: a clock may have been set back

    def take(self, event: Message, time: float) -> None:
        """Take the next event of the log, with its Unix time."""
        self._newest = max(self._newest, time)
        step = self.account.apply(event, self._newest)
        if step is None:
            return
        no_step = step.parts.get("faults", 0.0) + step.parts.get("start", 0.0) if step.what == "step" else 0.0
        self._seconds[KINDS[step.what]] += step.seconds - no_step  # pyright: ignore[reportArgumentType] - any numbers
        self._seconds[RESTARTS] += no_step  # pyright: ignore[reportArgumentType]

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the latest."""
        return self._newest - self.account.began

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind. They add up to the wall time."""
        rest = {"stopped": self.account.stopped_s, SINCE: max(0.0, self._newest - self.account.boundary)}
        return {kind: seconds for kind, seconds in {**dict(self._seconds), **rest}.items() if seconds > 0}

    def lines(self) -> Iterator[str]:
        """Format it for people, the longest first."""
        wall_s, seconds = self.wall_s, self.seconds()
        if wall_s <= 0:
            yield "the log has no time yet"
            return
        effective = seconds.get(KINDS["step"], 0.0) / wall_s
        steps = count_of(self.account.num_steps, "step")
        yield f"wall time    {duration(wall_s)}, {steps}; effective training time {effective:.1%}"
        for kind, of_kind in sorted(seconds.items(), key=lambda item: -item[1]):
            yield f"{kind:<36} {of_kind:>10.3f} s {of_kind / wall_s:>6.1%}"


def time_metrics(account: Account, event: BatchTrained) -> MetricRow:
    """Return the times of the step that the newest event ended, as metrics."""
    row, step = account.weights.row(), account.step
    if step is None or step.seconds <= 0:
        return row
    parts = {part: seconds for part, seconds in step.parts.items() if seconds > 0}
    return row | {
        **{f"perf/time/{part.replace(' ', '_')}": seconds for part, seconds in parts.items()},
        "perf/step_time": step.seconds,
        "perf/rollout_time": parts.get("rollout", 0.0) + parts.get("long tail", 0.0),
        "perf/wait_time_ratio": 1 - parts.get("train", 0.0) / step.seconds,
        "perf/tokens_per_sec": event.num_tokens / step.seconds,
    }


def progress_line(
    ledger: LedgerState,
    account: Account,
    *,
    step: int,
    num_again: int,
    num_steps: int,
    step_groups: int,
    tokens: int,
    started: float,
    now: float,
) -> str:
    """Format the progress as of `now`.

    Args:
        ledger: the state of the groups.
        account: of the run's time.
        step: number of the current step.
        num_again: steps before it that a restarted trainer has yet to train again.
        num_steps: planned train steps.
        step_groups: prompt groups of a step; 0: unknown.
        tokens: generated since the newest step.
        started: Unix time of the command.
        now: Unix time.
    """
    if account.is_idle:
        return f"starting for {duration(max(0.0, now - started))}"
    lasted_s = max(0.0, now - max(account.boundary, started))
    if again := again_text(step - 1, num_again):
        return f"{again}, {duration(lasted_s)} so far"
    if ledger.evaluation is not None:
        done = _evaluated(ledger.evaluation)
    elif step > num_steps:
        done = f"all {num_steps} steps are trained"
    else:
        ready = len(ledger.in_stage(Stage.READY)) + len(ledger.in_stage(Stage.BATCHED))
        of = f" of {step_groups}" if step_groups else ""
        done = f"step {step}/{num_steps}: {min(ready, step_groups or ready)}{of} groups"
    rate = [f"{tokens / lasted_s:,.0f} tok/s"] if tokens and lasted_s >= 1 else []
    parts = account.so_far(now)
    longest = max(parts, key=lambda part: parts[part], default="")
    named = [f"longest {longest} {duration(parts[longest])}"] if longest else []
    return ", ".join([done, *rate, *named, f"{duration(lasted_s)} so far"])


def again_text(steps: int, num_again: int) -> str:
    """Say which steps a restarted trainer trains again; empty: none.

    Args:
        steps: that were trained.
        num_again: the newest of them, which are not in the trainer's weights.
    """
    if num_again < 2:
        return f"step {steps} is trained again, on the same samples" if num_again else ""
    return f"steps {steps - num_again + 1} to {steps} are trained again, on the same samples"


def _evaluated(evaluation: Evaluation) -> str:
    done, of = sum(map(len, evaluation.items.values())), sum(evaluation.sizes.values())
    return f"evaluation after step {evaluation.step}: {done} of {of} items"
