"""What advice looks at: rewards, lengths, verdicts and times of the newest train steps. A pure fold."""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from messages import (
    BatchTrained,
    EventLoopBlocked,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    LastSample,
    Message,
    Outcome,
    RunFailed,
    RunFinished,
    RunStalled,
    RunStopped,
    VerdictGiven,
)
from messages.plain import clipped
from runtime.report.fold.spans import StepTime
from runtime.report.group_numbers import TRUNCATED as CUT
from runtime.report.group_numbers import Samples, rollout_s
from runtime.report.report import LOSSES
from runtime.util.formatting import duration

WINDOW: Final = 10  # steps
MIN_STEPS: Final = 5
MIN_GROUPS: Final = 40
MIN_SAMPLES: Final = 128
MAX_REASON: Final = 200  # characters
TIMEOUTS: Final = ("timeout", "took more than", "no verdict within", "no answer within")
KEPT_TIMES: Final = 64  # groups of an engine and step
KEPT_REASONS: Final = 16  # reasons of dropped groups, and signs, in a step
UNUSUAL: Final = ("start", "end", "faults", "evaluation", "checkpoint")  # parts that are not in every step
# Causes for which a turn that says what was said before forks. Another system message, other tools, a compaction and a
# repeated question are what the agent wants.
FORKS: Final = ("arguments", "thoughts", "text", "template")
TRUNCATED, REPETITION, SCRIPT, BYTES = "truncated", "repetition", "script", "bytes"  # keys of `signs`


class StepFacts(msgspec.Struct):
    """What happened from one train step to the next."""

    step: int = 0
    groups: int = 0  # with at least two graded samples
    equal: int = 0  # of them, those whose samples all have the same reward
    best: int = 0  # of the equal ones, those with the highest reward of the run
    ended: int = 0  # groups that were completed or failed
    failed: int = 0  # of them
    failures: dict[str, int] = {}  # failed groups, samples and scores by reason
    timed_out: int = 0  # groups of which a sample, or all of it, ran into a time limit
    seen: int = 0  # samples, also those that failed
    failed_samples: int = 0  # of completed groups: without a score, or left out
    blocked: dict[str, float] = {}  # seconds in which calls blocked event loops, by call
    judged: int = 0
    reasons: dict[str, int] = {}  # dropped groups by reason
    samples: int = 0
    signs: dict[str, int] = {}  # samples by sign of garbled output, and truncated ones
    length: float = 0.0  # sum of response tokens
    low: tuple[int, float] = 0, 0.0  # samples below the mean reward of their group, and their response tokens
    high: tuple[int, float] = 0, 0.0
    spread: tuple[int, float, float, float] = 0, 0.0, 0.0, 0.0  # samples, and sums of l*l, r*r and l*r among peers
    turns: int = 0  # of sessions of agents
    forks: dict[str, int] = {}  # of them, by cause
    engines: dict[str, list[float]] = {}  # seconds per token of groups
    parts: dict[str, float] = {}  # of its time
    slowest_score: str = ""

    @property
    def dropped(self) -> int:
        """Number of dropped groups."""
        return sum(self.reasons.values())


class RunFacts(msgspec.Struct):
    """Folds the events of a run into the facts of its newest steps. It is bounded."""

    steps: list[StepFacts] = []  # the newest 2 * WINDOW
    open: StepFacts = msgspec.field(default_factory=StepFacts)
    num_steps: int = 0
    had_spread: bool = False  # whether most groups once had different rewards
    best_reward: float | None = None
    first_script: float = -1.0  # share of samples in another script in the first MIN_STEPS steps
    stalled: str = ""  # what actors wait for, since the newest event
    is_over: bool = False

    def apply(self, event: Message, step: StepTime | None, samples: Samples | None = None) -> bool:
        """Fold the next event; return whether it ends a step.

        Args:
            event: the event.
            step: the step that it ends, as the time breakdown returned it.
            samples: of a completed group, if the caller has read them.
        """
        self.stalled = ""
        match event:
            case GroupCompleted():
                self._complete(event, samples or Samples.of(event.samples))
            case GroupFailed():
                self._fail(1, event.reason)
                self.open.ended += 1
            case GroupsClosed(outcome="failed"):
                self._fail(len(event.group_ids), event.reason)
                self.open.ended += len(event.group_ids)
            case EventLoopBlocked(ended=True):
                who = f"{event.function or event.actor}: {event.place}" if event.place else event.actor
                _add(self.open.blocked, who, event.blocked_s)
            case VerdictGiven(outcome=Outcome.FAILED):
                self._fail(1, event.reason or "")
            case VerdictGiven():
                self.open.judged += 1
                if event.outcome is Outcome.DROP:
                    _count(self.open.reasons, event.reason or "no reason given")
            case BatchTrained() if step is not None:
                self.is_over = False
                self._close(event, step)
                return True
            case RunStalled():
                waiting = "; ".join(f"{actor} waits for {what}" for actor, what in sorted(event.waiting.items()))
                self.stalled = f"no event for {duration(event.idle_s)}: {waiting}"
            case RunFinished() | RunFailed() | RunStopped():
                self.is_over = True
            case _:
                pass
        return False

    @property
    def window(self) -> list[StepFacts]:
        """The newest steps."""
        return self.steps[-WINDOW:]

    def _complete(self, event: GroupCompleted, samples: Samples) -> None:
        facts, last = self.open, event.last_sample
        facts.ended += 1
        facts.seen += len(samples.all)
        if samples.has_reasons:
            reasons = [reason for reason in samples.reason if reason is not None]
            facts.failed_samples += len(reasons)
            for reason in reasons:
                _count(facts.failures, clipped(reason, MAX_REASON))
            facts.timed_out += any(map(is_timeout, reasons))
        samples = samples.left_in
        for _ in range(samples.status.count(CUT)):
            _count(facts.signs, TRUNCATED)
        for sign in [sign for sample in samples.all for sign in sample.signs]:
            _count(facts.signs, sign)
        for session in [sample.metadata.get("session") for sample in samples.all if sample.metadata]:
            self._take_session(session)
        facts.samples += len(samples.response_len)
        facts.length += sum(samples.response_len)
        longest = max(samples.response_len, default=0)
        if last.engine and longest:
            times = facts.engines.setdefault(last.engine, [])
            if len(times) < KEPT_TIMES:
                times.append(rollout_s(event) / longest)
        self._compare(samples.graded, last)

    def _take_session(self, session: Any) -> None:
        """Count the turns and the forks of a session, as the rollout actor notes them."""
        try:
            turns, forks = int(session["turns"]), dict(session["forks"])
        except (TypeError, KeyError, ValueError):  # it is no session, but a user's own metadata
            return
        self.open.turns += turns
        for cause in FORKS:
            if number := forks.get(cause):
                self.open.forks[cause] = self.open.forks.get(cause, 0) + number

    def _fail(self, number: int, reason: str) -> None:
        """Note groups that failed."""
        self.open.failed += number
        self.open.timed_out += number * is_timeout(reason)
        for _ in range(number):
            _count(self.open.failures, clipped(reason, MAX_REASON))

    def _compare(self, samples: Samples, last: LastSample) -> None:
        """Compare rewards and lengths of the graded samples of one group."""
        if len(samples.reward) < 2 or not (last.grader or any(sample.own_reward for sample in samples.all)):
            return
        facts = self.open
        rewards = [reward or 0.0 for reward in samples.reward]
        best = self.best_reward = max(rewards if self.best_reward is None else [self.best_reward, *rewards])
        facts.groups += 1
        named = samples.all[0].rewards
        if rewards.count(rewards[0]) == len(rewards) and all(sample.rewards == named for sample in samples.all):
            facts.equal += 1
            facts.best += rewards[0] >= best
            return
        lengths = samples.response_len
        mean = sum(rewards) / len(rewards)
        low = [length for length, reward in zip(lengths, rewards, strict=True) if reward < mean]
        facts.spread = _with_spread(facts.spread, [len(sample.segments) for sample in samples.all], lengths, rewards)
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
        groups = sum_of(self.window, "groups")
        self.had_spread |= groups >= MIN_GROUPS and sum_of(self.window, "equal") < groups / 2
        if self.first_script < 0 and len(self.steps) >= MIN_STEPS:
            self.first_script = share_of(self.steps, SCRIPT)


def _with_spread(
    spread: tuple[int, float, float, float], turns: Sequence[int], lengths: Sequence[int], rewards: Sequence[float]
) -> tuple[int, float, float, float]:
    """Add how lengths and rewards of a group's samples differ from those of its samples with as many segments.

    A turn more makes a sample longer, as does the result of a tool: a reward for it pays for no long answer.
    """
    samples, ll, rr, lr = spread
    for number in set(turns):
        peers = [place for place, own in enumerate(turns) if own == number]
        mean_length = sum(lengths[place] for place in peers) / len(peers)
        mean_reward = sum(rewards[place] for place in peers) / len(peers)
        for place in peers:
            off_length, off_reward = lengths[place] - mean_length, rewards[place] - mean_reward
            ll += off_length * off_length
            rr += off_reward * off_reward
            lr += off_length * off_reward
    return samples + len(lengths), ll, rr, lr


def _count(counts: dict[str, int], name: str) -> None:
    """Count a name; beyond KEPT_REASONS names, count it as "others"."""
    name = name if name in counts or len(counts) < KEPT_REASONS else "others"
    counts[name] = counts.get(name, 0) + 1


def _add(sums: dict[str, float], name: str, number: float) -> None:
    """Add to a sum; beyond KEPT_REASONS names, to that of "others"."""
    name = name if name in sums or len(sums) < KEPT_REASONS else "others"
    sums[name] = sums.get(name, 0.0) + number


def is_timeout(reason: str) -> bool:
    """Whether a failure is that of a time limit, by the texts of graders, functions and filters."""
    return any(words in reason for words in TIMEOUTS)


def sum_of(steps: Sequence[StepFacts], name: str) -> int:
    """Return the sum of a fact over steps."""
    return sum(getattr(step, name) for step in steps)


def share_of(steps: Sequence[StepFacts], sign: str) -> float:
    """Return the share of samples with a sign; 0 with too few samples or steps."""
    samples = sum_of(steps, "samples")
    if samples < MIN_SAMPLES or len(steps) < MIN_STEPS:
        return 0.0
    return sum(step.signs.get(sign, 0) for step in steps) / samples


def time_in(steps: Sequence[StepFacts], parts: Sequence[str]) -> tuple[float, float, float]:
    """Return the share of the time that is in some parts, their mean seconds and the mean seconds of a step."""
    whole = math.fsum(seconds for step in steps for seconds in step.parts.values())
    taken = math.fsum(step.parts.get(part, 0.0) for step in steps for part in parts)
    number = max(1, len(steps))
    return (taken / whole if whole else 0.0), taken / number, whole / number


def mean_length(steps: Sequence[StepFacts]) -> float:
    """Return the mean length of responses in tokens."""
    return math.fsum(step.length for step in steps) / max(1, sum_of(steps, "samples"))


def side_sum(steps: Sequence[StepFacts], side: str) -> int:
    """Return the number of samples below ("low") or above ("high") the mean reward of their group."""
    return sum(getattr(step, side)[0] for step in steps)


def side_mean(steps: Sequence[StepFacts], side: str) -> float:
    """Return the mean length of these samples in tokens."""
    return math.fsum(getattr(step, side)[1] for step in steps) / max(1, side_sum(steps, side))
