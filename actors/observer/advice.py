"""Advice about a run: what slows it or keeps it from learning, the figure, and the settings that change it. Pure.

Each rule looks at the newest WINDOW train steps. A finding is shown once it held after two steps in a row, and goes
after three in a row without it. A rule needs enough steps, groups and samples; without them it says nothing.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from actors.observer.run_facts import (
    BYTES,
    MIN_GROUPS,
    MIN_SAMPLES,
    MIN_STEPS,
    REPETITION,
    SCRIPT,
    TRUNCATED,
    WINDOW,
    RunFacts,
    is_timeout,
    mean_length,
    share_of,
    side_mean,
    side_sum,
    sum_of,
    time_in,
)
from messages import Message
from messages.plain import clipped
from runtime.report.fold.account import Account
from runtime.report.fold.spans import StepTime
from runtime.report.group_numbers import Samples
from runtime.report.lines import blocked_text
from runtime.util.formatting import duration

LEARNT_STEPS: Final = 20  # before it, a run may still begin with a model that answers nothing
MIN_OF_ENGINE: Final = 10  # groups
HELD: Final = 2  # steps after which a finding is shown
MISSED: Final = 3  # steps after which it goes

SPREADLESS, SPREADLESS_AT_ONCE = 0.8, 0.95  # share of groups
DROPPED: Final = 0.75  # share of verdicts
FAILED: Final = 0.05  # share of groups or samples of the newest 20 steps
LAG_S, LAG_STEPS = 1.0, 3  # seconds in a step, and steps of the newest 20
RESTARTS_S, MIN_RESTARTS = 600.0, 2
TOGETHER_S: Final = 10.0  # processes that restart together do so within it
SLOWER: Final = 2.0  # times the median of the other engines
SCORED: Final = 0.3  # share of the time
BOTTLENECK: Final = 0.8  # share of the time
CORRELATED, GROWN, GAP_GROWN = 0.4, 1.25, 0.2  # of rewards and lengths; of the length; of the gap, in mean lengths
ENDLESS, ENDLESS_AT_ONCE = 0.5, 0.95  # share of samples
GARBLED: Final = 0.1  # share of samples
FORKED: Final = 0.1  # share of turns
STALLED, STALLED_S = 6.0, 60.0  # times the median step, and seconds at least
ENGINES: Final = ("rollout", "long tail", "queue")
TRAINING: Final = ("fetch", "train", "weights")
MAX_CHARS: Final = 300  # of a figure


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a run."""

    name: str
    figure: str
    since: int  # train step after which it was found
    meaning: str
    keys: tuple[str, ...]  # settings that change it, as the reference spells them


class Finding(msgspec.Struct):
    """A finding of one rule, over steps."""

    since: int
    figure: str
    held: int = 0
    missed: int = 0


class Adviser(msgspec.Struct):
    """Folds the events of a run into findings of the rules. It is bounded."""

    facts: RunFacts = msgspec.field(default_factory=RunFacts)
    findings: dict[str, Finding] = {}  # by rule

    def apply(self, event: Message, step: StepTime | None, samples: Samples | None = None) -> None:
        """Fold the next event.

        Args:
            event: the event.
            step: the step that it ends, as the time breakdown returned it.
            samples: of a completed group, if the caller has read them.
        """
        if self.facts.apply(event, step, samples):
            for rule in RULES:
                self._note(rule, rule.found(self.facts))

    def advice(self, account: Account) -> list[Advice]:
        """Return the advice as of the newest event: what is urgent first."""
        waits = STALL.found(self.facts) or self._long_step(account)
        now = self.facts.num_steps + 1
        shown = [_advice(STALL, now, waits)] if waits else []
        blocked, restarted = blocking_now(account), restarts(account)
        urgent = ((LAG, "" if self.facts.is_over else blocked), (RESTARTS, restarted))
        shown += [_advice(rule, now, figure) for rule, figure in urgent if figure]
        for rule in RULES:
            finding = self.findings.get(rule.name)
            if finding is not None and finding.held >= HELD and not (rule is LAG and blocked):
                shown.append(_advice(rule, finding.since, finding.figure))
        causes = {advice.name for advice in shown}
        return [advice for advice in shown if not (advice.name == ENGINES_LIMIT and causes & CAUSES)]

    def _note(self, rule: "Rule", figure: str | None) -> None:
        finding, facts = self.findings.get(rule.name), self.facts
        if figure is not None:
            if finding is None:
                first = facts.steps[0].step if len(facts.steps) <= WINDOW else facts.num_steps
                finding = self.findings[rule.name] = Finding(first, figure)
            finding.figure, finding.held, finding.missed = figure, finding.held + 1, 0
        elif finding is not None:
            finding.missed += 1
            if finding.held < HELD or finding.missed >= MISSED:
                del self.findings[rule.name]

    def _long_step(self, account: Account) -> str:
        """Describe a step that takes far longer than those before it; empty if none does."""
        facts = self.facts
        if facts.is_over or account.evaluation is not None or account.down or len(facts.window) < MIN_STEPS:
            return ""
        usual = statistics.median(math.fsum(step.parts.values()) for step in facts.window)
        lasts = account.last - account.boundary
        if lasts <= max(STALLED * usual, STALLED_S):
            return ""
        return f"step {facts.num_steps + 1} has lasted {duration(lasts)}, and others {duration(usual)}"


# rules


class Rule(NamedTuple):
    """When to give a piece of advice, and what it means."""

    name: str
    meaning: str
    keys: tuple[str, ...]
    found: Callable[[RunFacts], str | None]  # the figure; None: nothing to say


ENGINES_LIMIT: Final = "trainer waits for the engines"
CAUSES: Final = {"slow engine", "filter drops groups"}  # of that wait


def stall(run: RunFacts) -> str | None:
    """The node daemon reported that nothing happens."""
    return run.stalled or None


def no_spread(run: RunFacts) -> str | None:
    """Most groups have equal rewards. Not so once a run that had spread has solved its prompts."""
    groups, equal = sum_of(run.window, "groups"), sum_of(run.window, "equal")
    if len(run.window) < MIN_STEPS or groups < MIN_GROUPS:
        return None
    if run.had_spread and sum_of(run.window, "best") >= equal / 2:
        return None
    enough = SPREADLESS if run.num_steps >= LEARNT_STEPS else SPREADLESS_AT_ONCE
    return f"{equal / groups:.0%} of {groups} groups" if equal >= enough * groups else None


def dropping(run: RunFacts) -> str | None:
    """The filter drops most groups."""
    judged, dropped = sum_of(run.window, "judged"), sum_of(run.window, "dropped")
    if len(run.window) < MIN_STEPS or judged < MIN_GROUPS or dropped < DROPPED * judged:
        return None
    reasons = Counter[str]()
    for step in run.window:
        reasons.update(step.reasons)
    reason, count = reasons.most_common(1)[0]
    return f"{dropped / judged:.0%} of {judged} groups, {count} with the reason {reason!r}"


def slow_engine(run: RunFacts) -> str | None:
    """One engine takes much longer per token than the others."""
    times: dict[str, list[float]] = {}
    for step in run.window:
        for engine, seconds in step.engines.items():
            times.setdefault(engine, []).extend(seconds)
    medians = {name: statistics.median(found) for name, found in times.items() if len(found) >= MIN_OF_ENGINE}
    if len(run.window) < MIN_STEPS or len(medians) < 2:
        return None
    slowest = max(medians, key=lambda name: medians[name])
    others = statistics.median(seconds for name, seconds in medians.items() if name != slowest)
    if medians[slowest] < SLOWER * others:
        return None
    return f"{slowest} takes {1e3 * medians[slowest]:.1f} ms a token, the others {1e3 * others:.1f} ms"


def slow_grader(run: RunFacts) -> str | None:
    """Scores take a large part of the time."""
    share, seconds, of = time_in(run.window, ("scores",))
    if len(run.window) < MIN_STEPS or share < SCORED:
        return None
    slowest = run.window[-1].slowest_score
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s{f'; {slowest}' if slowest else ''}"


def engines_limit(run: RunFacts) -> str | None:
    """The trainer waits for generation most of the time."""
    share, seconds, of = time_in(run.window, ENGINES)
    if len(run.window) < MIN_STEPS or share < BOTTLENECK:
        return None
    queued, most = time_in(run.window, ("queue",)), max(time_in(run.window, (part,)) for part in ENGINES)
    why = "; most of it is waiting for a slot, since all slots of the engines are taken" if queued == most else ""
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s{why}"


def trainer_limits(run: RunFacts) -> str | None:
    """The engines wait for the trainer most of the time."""
    share, seconds, of = time_in(run.window, TRAINING)
    if len(run.window) < MIN_STEPS or share < BOTTLENECK:
        return None
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s"


def length_bias(run: RunFacts) -> str | None:
    """Responses grow, and longer ones get more reward in their group."""
    old, new = run.steps[:-WINDOW], run.window
    number, ll, rr, lr = (sum(step.spread[index] for step in new) for index in range(4))
    if len(old) < WINDOW or number < MIN_SAMPLES or not 0 < ll * rr < math.inf:  # squares of huge rewards overflow
        return None
    correlation, before, now = lr / math.sqrt(ll * rr), mean_length(old), mean_length(new)
    if correlation < CORRELATED or now < GROWN * before:
        return None
    return (
        f"correlation {correlation:.2f} in groups, while the mean response went from {before:.0f} to {now:.0f} tokens"
    )


def length_gap(run: RunFacts) -> str | None:
    """Worse responses grow, and become longer than better ones."""
    old, new = run.steps[:-WINDOW], run.window
    if len(old) < WINDOW or min(side_sum(new, "low"), side_sum(new, "high"), side_sum(old, "low")) < MIN_SAMPLES:
        return None
    low, high, low_before, high_before = (side_mean(steps, side) for steps in (new, old) for side in ("low", "high"))
    gap, before = low - high, low_before - high_before
    if gap <= 0 or gap - before < GAP_GROWN * mean_length(new) or low < GROWN * low_before:
        return None
    before_both = f"{low_before:.0f} and {high_before:.0f}"
    return f"worse responses have {low:.0f} tokens and better ones {high:.0f}, before {before_both}"


def endless(run: RunFacts) -> str | None:
    """Most responses do not end by themselves."""
    share = share_of(run.window, TRUNCATED)
    enough = ENDLESS if run.num_steps >= LEARNT_STEPS else ENDLESS_AT_ONCE
    return (
        None if share < enough else f"{share:.0%} of {sum_of(run.window, 'samples')} responses ran into a token limit"
    )


def repetition(run: RunFacts) -> str | None:
    """Many responses repeat themselves."""
    share = share_of(run.window, REPETITION)
    return None if share < GARBLED else f"{share:.0%} of {sum_of(run.window, 'samples')} responses"


def script(run: RunFacts) -> str | None:
    """Responses change to a script that their prompts do not use. A share from the first step on is the task's own."""
    share = share_of(run.window, SCRIPT)
    if share < max(0.0, run.first_script) + GARBLED:
        return None
    return f"{share:.0%} of {sum_of(run.window, 'samples')} responses, at first {max(0.0, run.first_script):.0%}"


def not_text(run: RunFacts) -> str | None:
    """Responses hold bytes that are not text."""
    share = share_of(run.window, BYTES)
    return None if share < GARBLED else f"{share:.0%} of {sum_of(run.window, 'samples')} responses"


def forking(run: RunFacts) -> str | None:
    """Many turns of agents do not go on from what was sampled."""
    turns, forks = sum_of(run.window, "turns"), Counter[str]()
    for step in run.window:
        forks.update(step.forks)
    if len(run.window) < MIN_STEPS or turns < MIN_SAMPLES or forks.total() < FORKED * turns:
        return None
    cause, number = forks.most_common(1)[0]
    return f"{forks.total() / turns:.0%} of {turns} turns, {number} because of {cause}"


def failed_groups(run: RunFacts) -> str | None:
    """Groups fail."""
    return _share_of(run, "failed", "ended", "groups", MIN_GROUPS)


def failed_samples(run: RunFacts) -> str | None:
    """Samples of groups that do not fail have no score, or failed."""
    return _share_of(run, "failed_samples", "seen", "samples", MIN_SAMPLES)


def timeouts(run: RunFacts) -> str | None:
    """Functions of users run into their time limits."""
    ended, late = sum_of(run.steps, "ended"), sum_of(run.steps, "timed_out")
    if ended < MIN_GROUPS or late < FAILED * ended:
        return None
    return f"in {late / ended:.0%} of {ended} groups{_newest_reason(run, only_timeouts=True)}"


def _share_of(run: RunFacts, name: str, whole: str, what: str, enough: int) -> str | None:
    part, of = sum_of(run.steps, name), sum_of(run.steps, whole)
    if of < enough or part < FAILED * of:
        return None
    return f"{part / of:.0%} of {of} {what}{_newest_reason(run)}"


def _newest_reason(run: RunFacts, *, only_timeouts: bool = False) -> str:
    counts = Counter[str]()
    for step in run.steps:
        counts.update({why: n for why, n in step.failures.items() if not only_timeouts or is_timeout(why)})
    most = counts.most_common(1)
    return f", {most[0][1]} with {most[0][0]!r}" if most else ""


def lag(run: RunFacts) -> str | None:
    """Calls block event loops, again and again."""
    steps = [step for step in run.steps if sum(step.blocked.values()) > LAG_S]
    if len(steps) < LAG_STEPS:
        return None
    calls = Counter[str]()
    for step in steps:
        for name, seconds in step.blocked.items():
            calls[name] += seconds  # pyright: ignore[reportArgumentType] - it adds any numbers
    (name, seconds), *_ = calls.most_common(1)
    return f"in {len(steps)} of {len(run.steps)} steps; {seconds:.1f} s by {name}"


def no_finding(_run: RunFacts) -> str | None:
    """Find nothing by steps: another function looks at the time of the log."""
    return None


def blocking_now(account: Account) -> str:
    """Describe the calls that block an event loop; empty if none does."""
    return "; ".join(blocked_text(event) for _, _, event in account.blocked.values())


def restarts(account: Account) -> str:
    """Describe the restarts of the last minutes; empty if there were fewer than two.

    Processes of one trainer or server, which restart together, count once.
    """
    counts, before = Counter[str](), dict[str, float]()
    for time, process in account.restarts:
        kind = process.partition(".")[0]
        if time >= account.last - RESTARTS_S and time - before.get(kind, 0.0) > TOGETHER_S:
            counts[kind] += 1
            before[kind] = time
    if counts.total() < MIN_RESTARTS:
        return ""
    named = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    return f"{counts.total()} restarts in {duration(RESTARTS_S)}: {named}"


STALL: Final = Rule(
    "stall",
    "The run does not go on. The figure names what is waited for, or how long a step lasts.",
    ("engines.<name>.next_token_after_s", "rollout.generate_timeout_s", "run.stall_after_s"),
    stall,
)
LAG: Final = Rule(
    "event loop blocked",
    "A call keeps an actor from everything else. Use an async library, or a thread: await asyncio.to_thread(call).",
    ("rollout.custom_generate", "rollout.custom_rollout", "run.unresponsive_after_s"),
    lag,
)
RESTARTS: Final = Rule(
    "restarts",
    "Processes end and are started again. The terminal and the end of their logs say why.",
    ("run.unresponsive_after_s", "engines.<name>.unresponsive_after_s"),
    no_finding,
)
RULES: Final = (
    LAG,
    Rule(
        "failed groups",
        "These groups train nothing. What fails is often long or hard, and then training sees less of it.",
        ("rollout.on_exception", "reward.on_failure", "data.0.rm_type", "rollout.custom_generate"),
        failed_groups,
    ),
    Rule(
        "failed samples",
        "These samples have no score, or their function failed. What is dropped bends the data if it is hard or long.",
        ("rollout.on_exception", "reward.on_failure", "data.0.rm_type", "rollout.custom_generate"),
        failed_samples,
    ),
    Rule(
        "time-outs",
        "A grader, a generate function or a filter runs into its time limit.",
        ("reward.timeout_s", "rollout.custom_generate_timeout_s", "reward.processes"),
        timeouts,
    ),
    Rule(
        "slow engine",
        "One engine needs much longer for a token than the others, and each batch waits for its groups.",
        ("engines.<name>.concurrency", "engines.<name>.nodes"),
        slow_engine,
    ),
    Rule(
        "slow grader",
        "The trainer waits for scores. More samples at once, more processes or a quicker grader help.",
        ("data.0.rm_type", "reward.processes", "reward.concurrency"),
        slow_grader,
    ),
    Rule(
        "filter drops groups",
        "Most generated groups are dropped, so most of the engines' work is lost.",
        ("rollout.dynamic_filter", "rollout.over_sampling_batch_size", "rollout.n_samples_per_prompt"),
        dropping,
    ),
    Rule(
        "groups without spread",
        "All samples of these groups have the same reward: their advantages are 0, and they teach nothing.",
        ("data.0.rm_type", "rollout.n_samples_per_prompt", "rollout.dynamic_filter", "rollout.temperature"),
        no_spread,
    ),
    Rule(
        "no end token",
        "Most responses are cut off. The limit is too low, or the model no longer ends its responses.",
        ("rollout.max_response_len", "rollout.temperature", "rollout.stop_token_ids", "data.0.apply_chat_template"),
        endless,
    ),
    Rule(
        "agents fork",
        "The client or the chat template writes recorded turns in another way. A fork is a further conversation: its "
        "prompt is computed again, and it shares the sample's vote.",
        ("rollout.agent.command", "model.hf_checkpoint"),
        forking,
    ),
    Rule(
        "repetition",
        "These responses repeat themselves: their last 2,000 characters compress to less than an eighth.",
        ("rollout.temperature", "optimizer.lr", "algorithm.kl.loss_coef"),
        repetition,
    ),
    Rule(
        "wrong script",
        "These responses use a script that their prompts do not have, more often than at first.",
        ("rollout.temperature", "optimizer.lr", "algorithm.kl.loss_coef"),
        script,
    ),
    Rule(
        "bytes that are not text",
        "These responses hold tokens that make no valid characters together, as random tokens do.",
        ("rollout.temperature", "rollout.top_p", "optimizer.lr"),
        not_text,
    ),
    Rule(
        "reward for length",
        "In their groups longer responses get more reward, and responses grow: the reward may pay for length.",
        ("algorithm.length_penalty.type", "algorithm.overlong_buffer_len", "data.0.rm_type"),
        length_bias,
    ),
    Rule(
        "worse responses grow",
        "A loss that divides by each response's length punishes long wrong responses too little.",
        ("algorithm.reduction.type", "algorithm.overlong_buffer_len"),
        length_gap,
    ),
    Rule(
        ENGINES_LIMIT,
        "Generation takes nearly all of the time. The engines, their slots or what a generate function waits for are "
        "the bottleneck, not the trainer.",
        ("engines.<name>.num_engines", "engines.<name>.concurrency", "rollout.max_staleness"),
        engines_limit,
    ),
    Rule(
        "engines wait for the trainer",
        "Training and weight updates take nearly all of the time. The trainer is the bottleneck, not the engines.",
        ("trainer.num_processes", "train.max_tokens_per_gpu", "trainer.weight_export"),
        trainer_limits,
    ),
)


def advice_lines(found: Iterable[Advice]) -> list[str]:
    """Format advice as lines, two for each."""
    lines: list[str] = []
    for advice in found:
        lines.append(f"advice: {advice.name}, since step {advice.since}: {advice.figure}")
        lines.append(f"  {advice.meaning} Settings: {', '.join(advice.keys)}")
    return lines


def _advice(rule: Rule, since: int, figure: str) -> Advice:
    return Advice(name=rule.name, figure=clipped(figure, MAX_CHARS), since=since, meaning=rule.meaning, keys=rule.keys)
