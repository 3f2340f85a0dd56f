"""Advice about a run: what slows it or keeps it from learning, the figure, and the settings that change it. Pure.

Each rule looks at the newest WINDOW train steps. A finding is shown once it held after two steps in a row, and goes
after three in a row without it. A rule needs enough steps, groups and samples; without them it says nothing.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from messages import (
    BatchTrained,
    GroupCompleted,
    LastSample,
    Message,
    Outcome,
    RunFailed,
    RunFinished,
    RunStalled,
    RunStopped,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from messages.plain import clipped
from runtime.report.breakdown import Breakdown, StepTime
from runtime.report.group_numbers import is_left_out
from runtime.report.report import LOSSES
from runtime.util.formatting import duration

WINDOW: Final = 10  # steps
MIN_STEPS: Final = 5
LEARNT_STEPS: Final = 20  # before it, a run may still begin with a model that answers nothing
MIN_GROUPS: Final = 40
MIN_SAMPLES: Final = 128
MIN_OF_ENGINE: Final = 10  # groups
HELD: Final = 2  # steps after which a finding is shown
MISSED: Final = 3  # steps after which it goes
KEPT_TIMES: Final = 64  # groups of an engine and step
KEPT_REASONS: Final = 16  # reasons of dropped groups in a step

SPREADLESS, SPREADLESS_AT_ONCE = 0.8, 0.95  # share of groups
DROPPED: Final = 0.75  # share of verdicts
SLOWER: Final = 2.0  # times the median of the other engines
SCORED: Final = 0.3  # share of the time
BOTTLENECK: Final = 0.8  # share of the time
CORRELATED, GROWN, GAP_GROWN = 0.4, 1.25, 0.2  # of rewards and lengths; of the length; of the gap, in mean lengths
ENDLESS, ENDLESS_AT_ONCE = 0.5, 0.95  # share of samples
GARBLED: Final = 0.1  # share of samples
STALLED, STALLED_S = 6.0, 60.0  # times the median step, and seconds at least
ENGINES: Final = ("rollout", "long tail", "queue")
TRAINING: Final = ("fetch", "train", "weights")
UNUSUAL: Final = ("start", "end", "faults", "evaluation", "checkpoint")  # parts that are not in every step
MAX_CHARS: Final = 300  # of a figure


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a run."""

    name: str
    figure: str
    since: int  # train step after which it was found
    meaning: str
    keys: tuple[str, ...]  # settings that change it, as the reference spells them


class StepFacts(msgspec.Struct):
    """What happened from one train step to the next."""

    step: int = 0
    groups: int = 0  # with at least two graded samples
    equal: int = 0  # of them, those whose samples all have the same reward
    best: int = 0  # of the equal ones, those with the highest reward of the run
    judged: int = 0
    reasons: dict[str, int] = {}  # dropped groups by reason
    samples: int = 0
    signs: dict[str, int] = {}  # samples by sign of garbled output, and truncated ones
    length: float = 0.0  # sum of response tokens
    low: tuple[int, float] = 0, 0.0  # samples below the mean reward of their group, and their response tokens
    high: tuple[int, float] = 0, 0.0
    spread: tuple[int, float, float, float] = 0, 0.0, 0.0, 0.0  # samples, and sums of l*l, r*r and l*r in groups
    engines: dict[str, list[float]] = {}  # seconds per token of groups
    parts: dict[str, float] = {}  # of its time
    slowest_score: str = ""

    @property
    def dropped(self) -> int:
        """Number of dropped groups."""
        return sum(self.reasons.values())


class Finding(msgspec.Struct):
    """A finding of one rule, over steps."""

    since: int
    figure: str
    held: int = 0
    missed: int = 0


class Adviser(msgspec.Struct):
    """Folds the events of a run into advice. It is bounded."""

    steps: list[StepFacts] = []  # the newest 2 * WINDOW
    open: StepFacts = msgspec.field(default_factory=StepFacts)
    num_steps: int = 0
    had_spread: bool = False  # whether most groups once had different rewards
    best_reward: float | None = None
    first_script: float = -1.0  # share of samples in another script in the first MIN_STEPS steps
    findings: dict[str, Finding] = {}
    stalled: str = ""  # what actors wait for, since the newest event
    is_over: bool = False

    def apply(self, event: Message, step: StepTime | None) -> None:
        """Fold the next event.

        Args:
            event: the event.
            step: the step that it ends, as the time breakdown returned it.
        """
        self.stalled = ""
        match event:
            case GroupCompleted():
                self._complete(event)
            case VerdictGiven():
                self.open.judged += 1
                if event.outcome is Outcome.DROP:
                    _count(self.open.reasons, event.reason or "no reason given", KEPT_REASONS)
            case BatchTrained() if step is not None:
                self.is_over = False
                self._close(event, step)
            case RunStalled():
                waiting = "; ".join(f"{actor} waits for {what}" for actor, what in sorted(event.waiting.items()))
                self.stalled = f"no event for {duration(event.idle_s)}: {waiting}"
            case RunFinished() | RunFailed() | RunStopped():
                self.is_over = True
            case _:
                pass

    def advice(self, breakdown: Breakdown) -> list[Advice]:
        """Return the advice as of the newest event: what is urgent first."""
        waits = STALL.found(self) or self._long_step(breakdown)
        shown = [_advice(STALL, self.num_steps + 1, waits)] if waits else []
        for rule in RULES:
            finding = self.findings.get(rule.name)
            if finding is not None and finding.held >= HELD:
                shown.append(_advice(rule, finding.since, finding.figure))
        causes = {advice.name for advice in shown}
        return [advice for advice in shown if not (advice.name == ENGINES_LIMIT and causes & CAUSES)]

    @property
    def window(self) -> list[StepFacts]:
        """The newest steps."""
        return self.steps[-WINDOW:]

    def _complete(self, event: GroupCompleted) -> None:
        facts, last = self.open, event.last_sample
        lengths: list[int] = []
        graded: list[SampleSummary] = []
        for sample in event.samples:
            if is_left_out(sample):
                continue
            lengths.append(sample.response_len)
            if sample.reward is not None and sample.reason is None:
                graded.append(sample)
            if sample.status is SampleStatus.TRUNCATED:
                _count(facts.signs, TRUNCATED, KEPT_REASONS)
            for sign in sample.signs:
                _count(facts.signs, sign, KEPT_REASONS)
        facts.samples += len(lengths)
        facts.length += sum(lengths)
        longest = max(lengths, default=0)
        if last.engine and longest:
            times = facts.engines.setdefault(last.engine, [])
            if len(times) < KEPT_TIMES:
                times.append(max(0.0, event.rollout_time_s - last.queue_time_s) / longest)
        self._compare(graded, last)

    def _compare(self, samples: Sequence[SampleSummary], last: LastSample) -> None:
        """Compare rewards and lengths of the graded samples of one group."""
        if len(samples) < 2 or not (last.grader or any(sample.own_reward for sample in samples)):
            return
        facts = self.open
        rewards = [sample.reward or 0.0 for sample in samples]
        best = self.best_reward = max(rewards if self.best_reward is None else [self.best_reward, *rewards])
        facts.groups += 1
        if rewards.count(rewards[0]) == len(rewards) and all(s.rewards == samples[0].rewards for s in samples):
            facts.equal += 1
            facts.best += rewards[0] >= best
            return
        lengths = [sample.response_len for sample in samples]
        mean, mean_length = sum(rewards) / len(rewards), sum(lengths) / len(lengths)
        ll = rr = lr = 0.0
        low: list[int] = []
        for length, reward in zip(lengths, rewards, strict=True):
            off_length, off_reward = length - mean_length, reward - mean
            ll += off_length * off_length
            rr += off_reward * off_reward
            lr += off_length * off_reward
            if off_reward < 0:
                low.append(length)
        before = facts.spread
        facts.spread = before[0] + len(lengths), before[1] + ll, before[2] + rr, before[3] + lr
        facts.low = facts.low[0] + len(low), facts.low[1] + sum(low)
        facts.high = facts.high[0] + len(lengths) - len(low), facts.high[1] + sum(lengths) - sum(low)

    def _close(self, event: BatchTrained, step: StepTime) -> None:
        facts, self.open = self.open, StepFacts()
        if event.replay or any(name in event.metrics for name in LOSSES):
            facts = StepFacts()  # demonstrations have no rewards, and a replay has no groups of its own
        facts.step = self.num_steps = step.step
        facts.parts = {part: seconds for part, seconds in step.parts.items() if part not in UNUSUAL}
        facts.slowest_score = step.worst.get("scores", "")
        self.steps.append(facts)
        del self.steps[: -2 * WINDOW]
        groups = _sum(self.window, "groups")
        self.had_spread |= groups >= MIN_GROUPS and _sum(self.window, "equal") < groups / 2
        if self.first_script < 0 and len(self.steps) >= MIN_STEPS:
            self.first_script = _share(self.steps, SCRIPT)
        for rule in RULES:
            self._note(rule, rule.found(self))

    def _note(self, rule: "Rule", figure: str | None) -> None:
        finding = self.findings.get(rule.name)
        if figure is not None:
            if finding is None:
                first = self.steps[0].step if len(self.steps) <= WINDOW else self.num_steps
                finding = self.findings[rule.name] = Finding(first, figure)
            finding.figure, finding.held, finding.missed = figure, finding.held + 1, 0
        elif finding is not None:
            finding.missed += 1
            if finding.held < HELD or finding.missed >= MISSED:
                del self.findings[rule.name]

    def _long_step(self, breakdown: Breakdown) -> str:
        """Describe a step that takes far longer than those before it; empty if none does."""
        if self.is_over or breakdown.evaluation is not None or breakdown.down or len(self.window) < MIN_STEPS:
            return ""
        usual = statistics.median(math.fsum(step.parts.values()) for step in self.window)
        lasts = breakdown.last - breakdown.boundary
        if lasts <= max(STALLED * usual, STALLED_S):
            return ""
        return f"step {self.num_steps + 1} has lasted {duration(lasts)}, and others {duration(usual)}"


# rules


class Rule(NamedTuple):
    """When to give a piece of advice, and what it means."""

    name: str
    meaning: str
    keys: tuple[str, ...]
    found: Callable[[Adviser], str | None]  # the figure; None: nothing to say


TRUNCATED, REPETITION, SCRIPT, BYTES = "truncated", "repetition", "script", "bytes"
ENGINES_LIMIT: Final = "trainer waits for the engines"
CAUSES: Final = {"slow engine", "filter drops groups"}  # of that wait


def stall(run: Adviser) -> str | None:
    """The node daemon reported that nothing happens."""
    return run.stalled or None


def no_spread(run: Adviser) -> str | None:
    """Most groups have equal rewards. Not so once a run that had spread has solved its prompts."""
    groups, equal = _sum(run.window, "groups"), _sum(run.window, "equal")
    if len(run.window) < MIN_STEPS or groups < MIN_GROUPS:
        return None
    if run.had_spread and _sum(run.window, "best") >= equal / 2:
        return None
    enough = SPREADLESS if run.num_steps >= LEARNT_STEPS else SPREADLESS_AT_ONCE
    return f"{equal / groups:.0%} of {groups} groups" if equal >= enough * groups else None


def dropping(run: Adviser) -> str | None:
    """The filter drops most groups."""
    judged, dropped = _sum(run.window, "judged"), _sum(run.window, "dropped")
    if len(run.window) < MIN_STEPS or judged < MIN_GROUPS or dropped < DROPPED * judged:
        return None
    reasons = Counter[str]()
    for step in run.window:
        reasons.update(step.reasons)
    reason, count = reasons.most_common(1)[0]
    return f"{dropped / judged:.0%} of {judged} groups, {count} with the reason {reason!r}"


def slow_engine(run: Adviser) -> str | None:
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


def slow_grader(run: Adviser) -> str | None:
    """Scores take a large part of the time."""
    share, seconds, of = _time(run.window, ("scores",))
    if len(run.window) < MIN_STEPS or share < SCORED:
        return None
    slowest = run.window[-1].slowest_score
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s{f'; {slowest}' if slowest else ''}"


def engines_limit(run: Adviser) -> str | None:
    """The trainer waits for generation most of the time."""
    share, seconds, of = _time(run.window, ENGINES)
    if len(run.window) < MIN_STEPS or share < BOTTLENECK:
        return None
    queued, most = _time(run.window, ("queue",)), max(_time(run.window, (part,)) for part in ENGINES)
    why = "; most of it is waiting for a slot, since all slots of the engines are taken" if queued == most else ""
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s{why}"


def trainer_limits(run: Adviser) -> str | None:
    """The engines wait for the trainer most of the time."""
    share, seconds, of = _time(run.window, TRAINING)
    if len(run.window) < MIN_STEPS or share < BOTTLENECK:
        return None
    return f"{share:.0%} of the time, {seconds:.3f} s of a step of {of:.3f} s"


def length_bias(run: Adviser) -> str | None:
    """Responses grow, and longer ones get more reward in their group."""
    old, new = run.steps[:-WINDOW], run.window
    number, ll, rr, lr = (math.fsum(step.spread[index] for step in new) for index in range(4))
    if len(old) < WINDOW or number < MIN_SAMPLES or not ll * rr:
        return None
    correlation, before, now = lr / math.sqrt(ll * rr), _mean_length(old), _mean_length(new)
    if correlation < CORRELATED or now < GROWN * before:
        return None
    return (
        f"correlation {correlation:.2f} in groups, while the mean response went from {before:.0f} to {now:.0f} tokens"
    )


def length_gap(run: Adviser) -> str | None:
    """Worse responses grow, and become longer than better ones."""
    old, new = run.steps[:-WINDOW], run.window
    if len(old) < WINDOW or min(_sum_of(new, "low"), _sum_of(new, "high"), _sum_of(old, "low")) < MIN_SAMPLES:
        return None
    low, high, low_before, high_before = (_mean_of(steps, side) for steps in (new, old) for side in ("low", "high"))
    gap, before = low - high, low_before - high_before
    if gap <= 0 or gap - before < GAP_GROWN * _mean_length(new) or low < GROWN * low_before:
        return None
    before_both = f"{low_before:.0f} and {high_before:.0f}"
    return f"worse responses have {low:.0f} tokens and better ones {high:.0f}, before {before_both}"


def endless(run: Adviser) -> str | None:
    """Most responses do not end by themselves."""
    share = _share(run.window, TRUNCATED)
    enough = ENDLESS if run.num_steps >= LEARNT_STEPS else ENDLESS_AT_ONCE
    return None if share < enough else f"{share:.0%} of {_sum(run.window, 'samples')} responses ran into a token limit"


def repetition(run: Adviser) -> str | None:
    """Many responses repeat themselves."""
    share = _share(run.window, REPETITION)
    return None if share < GARBLED else f"{share:.0%} of {_sum(run.window, 'samples')} responses"


def script(run: Adviser) -> str | None:
    """Responses change to a script that their prompts do not use. A share from the first step on is the task's own."""
    share = _share(run.window, SCRIPT)
    if share < max(0.0, run.first_script) + GARBLED:
        return None
    return f"{share:.0%} of {_sum(run.window, 'samples')} responses, at first {max(0.0, run.first_script):.0%}"


def not_text(run: Adviser) -> str | None:
    """Responses hold bytes that are not text."""
    share = _share(run.window, BYTES)
    return None if share < GARBLED else f"{share:.0%} of {_sum(run.window, 'samples')} responses"


STALL: Final = Rule(
    "stall",
    "The run does not go on. The figure names what is waited for, or how long a step lasts.",
    ("engines.<name>.next_token_after_s", "rollout.generate_timeout_s", "run.stall_after_s"),
    stall,
)
RULES: Final = (
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
        "repetition",
        "These responses repeat themselves: their last 2,000 characters compress to less than an eighth.",
        ("rollout.temperature", "optimizer.lr", "algorithm.kl_loss_coef"),
        repetition,
    ),
    Rule(
        "wrong script",
        "These responses use a script that their prompts do not have, more often than at first.",
        ("rollout.temperature", "optimizer.lr", "algorithm.kl_loss_coef"),
        script,
    ),
    Rule(
        "bytes that are no text",
        "These responses hold tokens that make no valid characters together, as random tokens do.",
        ("rollout.temperature", "rollout.top_p", "optimizer.lr"),
        not_text,
    ),
    Rule(
        "reward for length",
        "In their groups longer responses get more reward, and responses grow: the reward may pay for length.",
        ("algorithm.length_penalty", "algorithm.overlong_buffer_len", "data.0.rm_type"),
        length_bias,
    ),
    Rule(
        "worse responses grow",
        "A loss that divides by each response's length punishes long wrong responses too little.",
        ("algorithm.calculate_per_token_loss", "algorithm.overlong_buffer_len"),
        length_gap,
    ),
    Rule(
        ENGINES_LIMIT,
        "Generation takes nearly all of the time. The engines and their slots are the bottleneck, not the trainer.",
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


def _count(counts: dict[str, int], name: str, bound: int) -> None:
    """Count a name; beyond a number of names, count it as another one."""
    name = name if name in counts or len(counts) < bound else "others"
    counts[name] = counts.get(name, 0) + 1


def _sum(steps: Sequence[StepFacts], name: str) -> int:
    return sum(getattr(step, name) for step in steps)


def _share(steps: Sequence[StepFacts], sign: str) -> float:
    """Return the share of samples with a sign; 0 with too few samples or steps."""
    samples = _sum(steps, "samples")
    if samples < MIN_SAMPLES or len(steps) < MIN_STEPS:
        return 0.0
    return sum(step.signs.get(sign, 0) for step in steps) / samples


def _time(steps: Sequence[StepFacts], parts: Sequence[str]) -> tuple[float, float, float]:
    """Return the share of the time that is in some parts, their mean seconds and the mean seconds of a step."""
    whole = math.fsum(seconds for step in steps for seconds in step.parts.values())
    taken = math.fsum(step.parts.get(part, 0.0) for step in steps for part in parts)
    number = max(1, len(steps))
    return (taken / whole if whole else 0.0), taken / number, whole / number


def _mean_length(steps: Sequence[StepFacts]) -> float:
    return math.fsum(step.length for step in steps) / max(1, _sum(steps, "samples"))


def _sum_of(steps: Sequence[StepFacts], side: str) -> int:
    return sum(getattr(step, side)[0] for step in steps)


def _mean_of(steps: Sequence[StepFacts], side: str) -> float:
    return math.fsum(getattr(step, side)[1] for step in steps) / max(1, _sum_of(steps, side))
