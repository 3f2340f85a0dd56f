"""What a person sees of a run: a pure fold of its event log into lines, rows of metrics, a summary and a result.

It reads no clock: times are those of the log, and "now" is given.
"""

import math
import statistics
from collections import Counter, deque
from typing import Any

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    EvalEnded,
    EvalIssued,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    PromptsLoaded,
    RunFinished,
    RunStalled,
    SelectionFailed,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.ledger.books import stall_words, sum_line
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.report.group_numbers import BatchNumbers, GroupNumbers, is_ungraded
from runtime.wording import count_of, duration, number, sparkline

ENDS = 5  # steps whose mean is the first and the last reward
RECENT = 20  # steps that the time left is told from
SFT_LOSS = "train/sft_loss"  # a metric of steps on demonstrations alone
SHOWN_PER_REASON = 3  # a failure that repeats is told so often
SHOWN_REASONS = 20  # so many are told at all
PARTS = {"rollout": "perf/rollout_time", "train": "perf/train_time", "weights": "perf/update_weights_time"}

Row = dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """Something to print."""

    text: str


class RowDone(msgspec.Struct, frozen=True):
    """The metrics of one step are complete."""

    row: Row


class SampleShown(msgspec.Struct, frozen=True):
    """A finished group whose first sample is to be shown in full."""

    which: str  # "first" of this start, "last" of the run
    seq: int  # of its GroupCompleted in the log


Notice = Line | RowDone | SampleShown


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run in one JSON line."""

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


class _Clock(msgspec.Struct):
    """When things happened, in Unix time."""

    issued: dict[int, float] = {}  # first issue, by round
    batched: dict[int, float] = {}  # by step
    trained: float | None = None  # newest step
    announced: dict[int, float] = {}  # by weight version; the time its publication began
    update_s: float | None = None  # duration of the newest weight update, publication to confirmation
    eval_began: float | None = None
    eval_s: float = 0.0  # evaluation since the newest step


class Report:
    """Folds the events of a run, from the first on, into what is shown.

    Args:
        run: its name.
        num_steps: planned train steps.
        started: Unix time at which the command was given.
    """

    def __init__(self, run: str, num_steps: int, started: float) -> None:
        self.run = run
        self.num_steps = num_steps
        self.started = started
        self.steps = 0  # trained
        self._earlier_steps = 0  # of them before the command was given
        self.finished: str | None = None  # reason
        self.rewards: list[float] = []  # mean per step
        self.losses: list[float] = []  # of steps on demonstrations
        self.evals: dict[str, float] = {}  # newest mean by set
        self.first_evals: dict[str, float] = {}
        self.tokens = 0
        self.version = 0
        self._ledger = LedgerState()
        self._numbers = BatchNumbers()
        self._clock = _Clock()
        self._first_rollout: float | None = None
        self._row: Row | None = None  # newest step's; complete when the next one is trained
        self._evaluated_row: Row | None = None  # an older one, whose evaluation goes on
        self._reported: Counter[str] = Counter()  # tellings of each failure
        self._all_reported = False  # there were more
        self._dropped: dict[str, int] = {}  # as of the newest row
        self._recent_s: deque[float] = deque(maxlen=RECENT)  # step times
        self._spent_s: Counter[str] = Counter()  # by part of a step
        self._timed_steps = 0

    def begin(self, ledger: LedgerState) -> None:
        """Begin in the middle: what came before can only be had as the state of the ledger."""
        self._ledger, self.version = ledger, ledger.version
        self.steps = self._earlier_steps = ledger.trained_steps

    def apply(self, event: Message, seq: int, time: float) -> list[Notice]:
        """Take the next event of the log.

        Args:
            seq: its sequence in the log.
            time: when the log took it, Unix time in seconds.
        """
        if isinstance(event, LEDGER_EVENTS):
            fold(self._ledger, event, seq)
        match event:
            case BatchTrained():
                return self._train(event, time)
            case TrainerStarted():
                return self._settle_untold(event)
            case GroupCompleted():
                self._numbers.complete(event, seq)
                return self._complete(event, seq, time)
            case EvalEnded():
                return self._evaluate(event, time)
            case RunFinished():
                self.finished = event.reason
                return self.close()
            case _:
                self._note_time(event, time)
                lines = [Line(text) for text in self._words_of(event)]
                return [*lines, *self._last_sample(event, time)]

    def _last_sample(self, event: Message, time: float) -> list[Notice]:
        if not isinstance(event, BatchReady) or event.step + 1 != self.num_steps or time < self.started:
            return []
        return [SampleShown("last", max(ref.event_seq for ref in event.groups))]

    def close(self) -> list[Notice]:
        """No more events will come: the newest row is as complete as it gets."""
        row, self._row = self._row, None
        running = self._ledger.evaluation
        if row is not None and running is not None and running.step == row["step"]:
            self._evaluated_row = row
        return [] if row is None else [RowDone(row)]

    def result(self, now: float) -> Result:
        """The outcome as of now, Unix time in seconds."""
        return Result(
            run=self.run,
            steps=self.steps,
            reward_first=None if self.losses else _mean(self.rewards[:ENDS]),
            reward_last=None if self.losses else _mean(self.rewards[-ENDS:]),
            loss_first=_mean(self.losses[:ENDS]),
            loss_last=_mean(self.losses[-ENDS:]),
            eval_last=next(iter(self.evals.values()), None),
            seconds=round(now - self.started, 3),
            time_to_first_rollout_s=self._first_rollout and round(self._first_rollout - self.started, 3),
            tokens=self.tokens,
            groups=msgspec.structs.asdict(self._ledger.books()),
        )

    def summary(self, now: float) -> list[str]:
        """The outcome as of now for people."""
        result = self.result(now)
        first = result.time_to_first_rollout_s
        new = f", {self.steps - self._earlier_steps} of them" if self._earlier_steps else ""
        lines = [
            f"steps     {self.steps} of {self.num_steps}{new} in {duration(result.seconds)}"
            + (f", first rollout after {first:.1f} s" if first is not None else "")
        ]
        for name, first, last, curve in (
            ("reward", result.reward_first, result.reward_last, self.rewards),
            ("loss", result.loss_first, result.loss_last, self.losses),
        ):
            if first is not None and last is not None:
                lines.append(f"{name:9} {number(first)} → {number(last)}  {sparkline(curve)}")
        for name, value in self.evals.items():
            lines.append(f"eval      {number(self.first_evals[name])} → {number(value)}  {name}")
        lines.append(f"groups    {self.books_line()}")
        for what, tally in (("dropped", self._ledger.dropped), ("failed", self._ledger.failed)):
            lines += [f"          {what}: {count} {reason}" for reason, count in sorted(tally.items())[:10]]
        return [*lines, *self._time_lines()]

    def books_line(self, *, brief: bool = False) -> str:
        """The books as a sum; in brief without its zeros."""
        return sum_line(self._ledger.books(), brief=brief)

    def _train(self, event: BatchTrained, time: float) -> list[Notice]:
        groups = self._numbers.settle(event.step)
        if groups is None:
            return []  # replayed after a crash, or said twice
        notices = self.close()
        self.steps = max(self.steps, event.step + 1)
        if time < self.started:
            self._earlier_steps = self.steps
        self.tokens += event.num_tokens
        row: Row = {"step": event.step + 1, "time": time, "rollout/step": event.step}
        if SFT_LOSS in event.metrics:
            self.losses.append(event.metrics[SFT_LOSS])
        row |= self._group_metrics(groups) | self._drop_metrics() | self._time_metrics(event, time) | event.metrics
        row |= {"train/num_tokens": event.num_tokens, "weights/version": self.version}
        row |= {f"groups/{name}": count for name, count in msgspec.structs.asdict(self._ledger.books()).items()}
        self._row = row
        return [*notices, Line(self._step_line(row))]

    def _settle_untold(self, event: TrainerStarted) -> list[Notice]:
        """The loaded checkpoint holds these steps: they were trained, though nothing was said of them."""
        for step in self._numbers.unsettled_below(event.step):
            groups = self._numbers.settle(step)
            self.rewards.append(_mean([reward for group in groups or () for reward in group.rewards]) or 0.0)
        self.steps = max(self.steps, event.step)
        self._clock = _Clock()  # the times of a step that was interrupted would hold the restart
        return [Line(f"trainer continues after step {event.step}")] if event.step else []

    def _complete(self, event: GroupCompleted, seq: int, time: float) -> list[Notice]:
        ungraded = [sample for sample in event.samples if is_ungraded(sample)]
        told = {f"no score, reward {sample.reward:g} instead: {sample.reason}" for sample in ungraded}
        lines: list[Notice] = [Line(text) for reason in sorted(told) for text in self._repeating(reason)]
        if self._first_rollout is not None or time < self.started:
            return lines
        self._first_rollout = time
        return [*lines, SampleShown("first", seq)]

    def _evaluate(self, event: EvalEnded, time: float) -> list[Notice]:
        means = {key.removeprefix("eval/"): value for key, value in event.metrics.items() if _is_mean(key)}
        self.evals |= means
        self.first_evals = means | self.first_evals
        if self._clock.eval_began is not None:
            self._clock.eval_s += time - self._clock.eval_began
        self._clock.eval_began = None
        metrics = {"eval/step": event.step, **event.metrics}
        told = ", ".join(f"{name} {number(value)}" for name, value in means.items())
        line = Line(f"evaluation after step {event.step} (weights v{event.version}): {told}")
        if self._row is not None and self._row["step"] == event.step:
            self._row |= metrics
            return [line]
        before, self._evaluated_row = self._evaluated_row, None
        if event.step == 0:
            before = {"step": 0, "time": time}
        elif before is None or before["step"] != event.step:
            return [line]  # what is known of it was told before this start
        return [line, RowDone(before | metrics)]

    def _note_time(self, event: Message, time: float) -> None:
        clock = self._clock
        match event:
            case GroupsIssued():
                clock.issued.setdefault(event.round, time)
            case BatchReady():
                clock.batched[event.step] = time
                self._numbers.batch(event, [group.event_seq for group in self._ledger.groups.values()])
            case WeightsAnnounced():
                clock.announced[event.version] = time - event.took_s
            case WeightsApplied():
                self.version = max(self.version, event.version)
                if event.version in clock.announced:
                    clock.update_s = time - clock.announced[event.version]
                    for version in [version for version in clock.announced if version < event.version]:
                        del clock.announced[version]
            case EvalIssued():
                clock.eval_began = time
            case _:
                pass

    def _words_of(self, event: Message) -> list[str]:
        match event:
            case PromptsLoaded():
                if event.num_prompts == 0:
                    return [f"data {event.data}: prompts by number, without end"]
                left_out = f", {event.num_too_long} over the length limit left out" if event.num_too_long else ""
                return [f"data {event.data}: {count_of(event.num_prompts, 'prompt')}{left_out}"]
            case ActorExited(restart_in_s=float(delay_s)):
                return [f"{event.actor} ended: {event.reason}; restarting in {delay_s:g} s"]
            case ActorStarted() if event.restarts:
                return [f"{event.actor} restarted (restart {event.restarts}, pid {event.pid})"]
            case CheckpointSaved():
                return [f"checkpoint of step {event.step} saved in {event.took_s:.1f} s"]
            case RunStalled():
                return [stall_words(event)]
            case CheckpointRequested():
                return [f"the {event.stream} stream is {event.used:.0%} full: a checkpoint is asked for"]
            case MessageDeadLettered():
                return self._repeating(f"message on {event.subject} set aside: {event.reason}")
            case GroupFailed():
                return self._repeating(f"group failed: {event.reason}")
            case GroupsClosed(outcome="failed"):
                return self._repeating(f"group failed: {event.reason}")
            case SelectionFailed():
                return self._repeating(f"rollout.{event.kind} failed, first come first instead: {event.reason}")
            case VerdictGiven(outcome="failed"):
                return self._repeating(f"filter failed: {event.reason}")
            case _:
                return []

    def _repeating(self, text: str) -> list[str]:
        if text not in self._reported and len(self._reported) >= SHOWN_REASONS:
            told, self._all_reported = self._all_reported, True
            return [] if told else [f"failures for yet other reasons are not shown; see bin/ledger {self.run}"]
        self._reported[text] += 1
        if self._reported[text] > SHOWN_PER_REASON:
            return []
        return [text if self._reported[text] < SHOWN_PER_REASON else f"{text} (no more of these are shown)"]

    def _group_metrics(self, groups: tuple[GroupNumbers, ...]) -> Row:
        rewards = [reward for group in groups for reward in group.rewards]
        lengths = [length for group in groups for length in group.response_lens]
        mean, ungraded = _mean(rewards), sum(group.num_ungraded for group in groups)
        self.rewards.append(mean or 0.0)
        if mean is None or not lengths:
            return {}
        graded: Row = {} if self.losses else _reward_metrics(groups, mean)
        return {
            **graded,
            "rollout/response_len/mean": statistics.fmean(lengths),
            "rollout/response_len/median": statistics.median(lengths),
            "rollout/response_len/max": max(lengths),
            "rollout/response_len/min": min(lengths),
            "rollout/truncated_ratio": sum(group.num_truncated for group in groups) / len(lengths),
            **({"rollout/no_score_ratio": ungraded / len(lengths)} if ungraded else {}),
            **_round_metrics([turns for group in groups for turns in group.round_numbers]),
            "perf/group_rollout_time": statistics.fmean(group.rollout_time_s for group in groups),
        }

    def _drop_metrics(self) -> Row:
        """Drops since the step before."""
        now, before = self._ledger.dropped, self._dropped
        self._dropped = dict(now)
        new = {reason: count - before.get(reason, 0) for reason, count in now.items()}
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in new.items() if count}

    def _time_metrics(self, event: BatchTrained, time: float) -> Row:
        """Where the time of a step went. Times overlap when `max_staleness` lets rollout run ahead."""
        clock, step = self._clock, event.step
        began, batched = clock.issued.pop(step, None), clock.batched.pop(step, time)
        before, clock.trained = clock.trained, time
        eval_s, clock.eval_s = clock.eval_s, 0.0
        since = before if before is not None else began
        step_s = time - since if since is not None else 0.0
        times: Row = {"perf/train_time": event.metrics.get("perf/train_time", time - batched)}
        if began is not None:
            times["perf/rollout_time"] = max(0.0, batched - began)
        if clock.update_s is not None:
            times["perf/update_weights_time"] = clock.update_s
        if eval_s:
            times["perf/eval_time"] = eval_s
        if step_s > 0:
            wait_s = max(0.0, step_s - times["perf/train_time"])
            times |= {"perf/step_time": step_s, "perf/train_wait_time": wait_s, "perf/wait_time_ratio": wait_s / step_s}
            times["perf/tokens_per_sec"] = event.num_tokens / step_s
            self._account(times, step_s, eval_s)
        return times

    def _account(self, times: Row, step_s: float, eval_s: float) -> None:
        self._recent_s.append(step_s)
        self._timed_steps += 1
        parts = {part: times.get(key, 0.0) for part, key in PARTS.items()} | {"evaluation": eval_s}
        parts["other"] = max(0.0, step_s - math.fsum(parts.values()))
        self._spent_s.update({**parts, "step": step_s})  # pyright: ignore[reportArgumentType] - it adds any numbers

    def _step_line(self, row: Row) -> str:
        fields = [
            f"step {row['step']:>{len(str(self.num_steps))}}/{self.num_steps}",
            f"loss {number(self.losses[-1])}" if self.losses else f"reward {number(self.rewards[-1])}",
            *(f"{_short(name, self.evals)} {number(value)}" for name, value in self.evals.items()),
            *_staleness_field(row),
            *(f"{row[key]:,.0f} tok/s" for key in ("perf/tokens_per_sec",) if key in row),
            f"groups {self.books_line(brief=True)}",
        ]
        if not self.losses:  # demonstrations need no engine, so nobody takes weights
            fields.append(f"weights v{self.version}")
        if self._recent_s and self.steps < self.num_steps:
            left_s = statistics.fmean(self._recent_s) * (self.num_steps - self.steps)
            fields.append(f"{duration(left_s)} left")
        return " | ".join(fields)

    def _time_lines(self) -> list[str]:
        if not self._timed_steps:
            return []
        whole_s = self._spent_s["step"]
        shares = [
            f"{part} {seconds / self._timed_steps:.3f} s ({seconds / whole_s:.0%})"
            for part, seconds in self._spent_s.items()
            if part != "step" and seconds > 0
        ]
        overlap = "; parts overlap" if self._spent_s.total() - whole_s > 1.01 * whole_s else ""
        return [f"time      {whole_s / self._timed_steps:.3f} s a step: {', '.join(shares)}{overlap}"]


def _round_metrics(turns: list[float]) -> Row:
    """Of the samples that name their number of turns, as a generate function of several turns does."""
    if not turns:
        return {}
    named = {"mean": statistics.fmean(turns), "max": max(turns), "min": min(turns)}
    return {f"multi_turn/round_number_{name}": value for name, value in named.items()}


def _staleness_field(row: Row) -> list[str]:
    """What a step line says of staleness: nothing when every token was sampled by the weights it trained."""
    largest = row.get("rollout/staleness_max", 0.0)
    return [f"staleness {row['rollout/staleness_mean']:.2f} (max {largest:g})"] if largest else []


def _reward_metrics(groups: tuple[GroupNumbers, ...], mean: float) -> Row:
    equal = Counter(round(group.rewards[0], 1) for group in groups if len(set(group.rewards)) == 1)
    return {
        "rollout/raw_reward": mean,
        **{f"rollout/zero_std/count_{reward:g}": count for reward, count in sorted(equal.items())},
        "perf/group_reward_time": statistics.fmean(group.reward_time_s for group in groups),
    }


def _is_mean(key: str) -> bool:
    """Whether a metric is an evaluation set's mean reward: eval/<set>, set names hold neither "-" suffixes nor "/"."""
    name = key.removeprefix("eval/")
    return key != name and "/" not in name and not name.endswith("-truncated_ratio") and "-pass@" not in name


def _short(name: str, evals: dict[str, float]) -> str:
    return "eval" if len(evals) == 1 else f"eval {name}"


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
