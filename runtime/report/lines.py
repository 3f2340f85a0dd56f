"""Terminal lines for events and steps. Repeated failures are limited. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    CheckpointRequested,
    CheckpointSaved,
    CheckpointSetAside,
    EngineRequestsFailed,
    EngineState,
    EngineStateChanged,
    EventLoopBlocked,
    GroupFailed,
    GroupsClosed,
    Message,
    MessageDeadLettered,
    NodeLeft,
    Outcome,
    PromptsLoaded,
    RoundHalted,
    RunStalled,
    ScoreRequestsLost,
    SelectionFailed,
    UserFunctionRaised,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
    WeightsLost,
    WeightsProgressed,
    WeightsRefused,
)
from runtime.ledger.books import stall_text
from runtime.util.formatting import count_of, duration, number
from runtime.util.import_path import command_name
from runtime.util.tracebacks import places_in

FILTER_FAILED = Outcome.FAILED  # a name of this module is read ten times quicker than an enum's member
SHOWN_PER_REASON = 3  # maximum number of lines per failure reason
SHOWN_REASONS = 20  # maximum number of failure reasons
SHOWN_ENGINES = 3  # of slow weight updates
MASKED = {  # why the commonest rules leave tokens without a gradient; docs/reference/metrics.md has all rules
    "zero_advantage": "equal rewards in their group",
    "loss_mask": "not sampled, such as tool output",
    "clip": "their probability has changed too much",
}
SHOWN_NOT_FINITE = 5  # NaN or infinite metrics shown per step


class Failures(msgspec.Struct):
    """Lines for failures, limited per reason."""

    _reported: dict[str, int] = {}  # lines per failure text
    _all_reported: bool = False  # further reasons are not shown
    _raised: set[str] = set()  # places of tracebacks that were shown

    def lines(self, text: str, run: str) -> list[str]:
        """Return the line for a failure, or nothing at the limit.

        Args:
            text: the failure.
            run: name of the run, for the hint to the command `ledger`.
        """
        if text not in self._reported and len(self._reported) >= SHOWN_REASONS:
            was_reported, self._all_reported = self._all_reported, True
            ledger = f"{command_name('ledger')} {run}"
            return [] if was_reported else [f"failures for further reasons are not shown; see {ledger}"]
        self._reported[text] = 1 + self._reported.get(text, 0)
        if self._reported[text] > SHOWN_PER_REASON:
            return []
        return [text if self._reported[text] < SHOWN_PER_REASON else f"{text} (no more of these are shown)"]

    def traceback(self, event: UserFunctionRaised) -> list[str]:
        """Return the lines of a user's traceback, or nothing if one of the same places was shown."""
        places = "\n".join(places_in(event.traceback)) or event.traceback
        if places in self._raised or len(self._raised) >= SHOWN_REASONS:
            return []
        self._raised.add(places)
        did = "took too long and was ended here" if event.took_too_long else "raised"
        return [f"{event.function} {did}:", *(f"  {line}" for line in event.traceback.splitlines())]


def failure_in(event: Message) -> str | None:
    """Return the failure that an event reports, for events without a bound in number."""
    match event:
        case VerdictGiven():  # the commonest one
            return f"rollout.dynamic_filter failed: {event.reason}" if event.outcome is FILTER_FAILED else None
        case MessageDeadLettered():
            return f"message on {event.subject} set aside: {event.reason}"
        case GroupFailed():
            return f"group failed: {event.reason}"
        case GroupsClosed(outcome="failed"):
            return f"group failed: {event.reason}"
        case EventLoopBlocked(ended=False):
            return blocked_text(event)
        case SelectionFailed():
            return f"rollout.{event.kind} failed, first come first instead: {event.reason}"
        case _:
            return None


def blocked_text(event: EventLoopBlocked) -> str:
    """Say what blocks an event loop, and for how long."""
    who = event.function or (f"{event.actor}: code of Physarum" if event.is_ours else f"{event.actor}: a call")
    where = f": {event.place}" if event.place else ""
    return f"{who} has blocked the event loop for {int(event.blocked_s)} s{where}"


def line_of(event: Message) -> str | None:
    """Return the line for a rare event."""
    match event:
        case VerdictGiven():  # the commonest one
            return None
        case PromptsLoaded():
            return _data_line(event)
        case ActorExited(restart_in_s=float(delay_s)):
            return f"{event.actor} ended: {event.reason}; restarting in {delay_s:.1f} s"
        case ActorStarted() if event.restarts:
            return f"{event.actor} restarted (restart {event.restarts}, pid {event.pid})"
        case RoundHalted(by_hand=True):
            return f"round {event.round} was halted by hand: its groups go on in the next round"
        case CheckpointSaved():
            return f"checkpoint of step {event.step} saved in {event.took_s:.1f} s"
        case CheckpointSetAside():
            damaged = f"the checkpoint of step {event.step} is damaged and was set aside as {event.path}"
            return f"{damaged}: {event.reason}"
        case EngineStateChanged(new=EngineState.SUSPECT | EngineState.PAUSED | EngineState.QUARANTINED):
            return f"{event.engine} is {event.new}: {event.reason}"
        case EngineRequestsFailed():
            times = f", {event.num_failures} times now" if event.num_failures > 1 else ""
            return f"a request to {event.engine} failed{times}: {event.reason}"
        case WeightsLost():
            lost = f"no engine of {event.instance} holds weights v{event.version} any more"
            return f"{lost}: their evaluation goes on with v{event.newer}"
        case WeightsRefused():
            return _refusal_line(event)
        case WeightsApplied() if event.not_compared:
            return _not_compared_line(event)
        case WeightsProgressed():
            shown = [f"{engine} {doing}" for engine, doing in list(event.engines.items())[:SHOWN_ENGINES]]
            more = len(event.engines) - len(shown)
            return f"weights v{event.version}: {'; '.join(shown)}{f' and {more} more engines' if more else ''}"
        case WeightsAnnounced(again_of=int(first)) if first:
            return f"weights v{event.version} are those of v{first} once more: engines could not use its files"
        case RunStalled():
            return stall_text(event)
        case ScoreRequestsLost():
            requests = f"the grader {event.grader} acknowledged {event.num_lost} score requests without an answer"
            who = f"; credentials that may grade it: {', '.join(event.credentials)}" if event.credentials else ""
            return f"{requests}{who}"
        case NodeLeft():
            return f"node {event.node} left the run: {event.reason}"
        case CheckpointRequested():
            return f"the {event.stream} stream is {event.used:.0%} full: a checkpoint is requested"
        case _:
            return None


def _not_compared_line(event: WeightsApplied) -> str:
    shown = [f"{', '.join(engines[:SHOWN_ENGINES])} ({why})" for why, engines in event.not_compared.items()]
    return (
        f"tensors are not compared with the trainer's sums at {'; '.join(shown)}: the probe finds wrong weights there, "
        "not a wrong bit or a small change"
    )


def _refusal_line(event: WeightsRefused) -> str:
    times = f", {event.num_refusals} times now" if event.num_refusals > 1 else ""
    if not event.version:  # no weights were announced yet
        return f"{event.engine} cannot be used{times}: {event.reason}"
    return f"{event.engine} does not work with weights v{event.version}{times}: {event.reason}"


def _data_line(event: PromptsLoaded) -> str:
    if event.num_prompts == 0:
        return f"data {event.data}: prompts by number, without end"
    left_out = f", {event.num_too_long} over the length limit left out" if event.num_too_long else ""
    return f"data {event.data}: {count_of(event.num_prompts, 'prompt')}{left_out}"


def step_line(
    row: Mapping[str, Any],
    *,
    num_steps: int,
    rewards: Sequence[float],
    losses: Sequence[float],
    evals: Mapping[str, float],
    books: str,
    step_times_s: Sequence[float],
) -> str:
    """Format the line of a trained step.

    Args:
        row: its metrics so far.
        num_steps: planned train steps.
        rewards: mean of each step so far.
        losses: of steps on demonstrations; without engines there is no weight version to show.
        evals: newest mean reward by set.
        books: the brief sum line.
        step_times_s: durations of recent steps.
    """
    fields = [
        f"step {row['step']:>{len(str(num_steps))}}/{num_steps}",
        f"loss {number(losses[-1])}" if losses else f"reward {number(rewards[-1])}",
        *(f"{_short(name, evals)} {number(value)}" for name, value in evals.items()),
        *_staleness_field(row),
        *(f"{row[key]:,.0f} tok/s" for key in ("perf/tokens_per_sec",) if key in row),
        f"groups {books}",
    ]
    if not losses:
        fields.append(f"weights v{row['weights/version']}")
    if step_times_s and row["step"] < num_steps:
        fields.append(f"{duration(statistics.fmean(step_times_s) * (num_steps - row['step']))} left")
    return " | ".join([*fields, *_not_finite_field(row)])


def masked_line(metrics: Mapping[str, float]) -> str | None:
    """Return the line of the first train step about the tokens that each rule masked. None: they were not counted."""
    if "train/num_response_tokens" not in metrics:
        return None
    total = f"{metrics['train/num_response_tokens']:,.0f} response tokens"
    rules = {name.removeprefix("train/").partition("/"): count for name, count in metrics.items() if count}
    found = {rule: count for (family, _, rule), count in rules.items() if family == "masked_tokens"}
    if not found:
        return f"first train step: no rule masked any of {total}"
    counts = ", ".join(f"{count:,.0f} {rule}{_why(rule)}" for rule, count in found.items())
    return f"first train step: masked or limited of {total}: {counts}"


def _why(rule: str) -> str:
    return f" ({MASKED[rule]})" if rule in MASKED else ""


def _not_finite_field(row: Mapping[str, Any]) -> list[str]:
    """Return a field with the NaN or infinite metrics of a step, if there are any."""
    wrong = [f"{name} {value}" for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    more = f" and {len(wrong) - SHOWN_NOT_FINITE} more" if len(wrong) > SHOWN_NOT_FINITE else ""
    return [f"not finite: {', '.join(wrong[:SHOWN_NOT_FINITE])}{more}"] if wrong else []


def _staleness_field(row: Mapping[str, Any]) -> list[str]:
    """Return the staleness field, if any token is stale."""
    largest = row.get("rollout/staleness_max", 0.0)
    return [f"staleness {row['rollout/staleness_mean']:.2f} (max {largest:g})"] if largest else []


def _short(name: str, evals: Mapping[str, float]) -> str:
    return "eval" if len(evals) == 1 else f"eval {name}"
