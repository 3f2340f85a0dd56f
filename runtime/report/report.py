"""The report of a run: a pure fold of its event log into lines, metric rows, a summary and a result.

It reads no clock: times come from the log, and "now" is an argument.
"""

from collections.abc import Sequence

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    EvalCompleted,
    EvalEnded,
    GroupCompleted,
    Message,
    PairsEvaluated,
    RunFinished,
    SnapshotTaken,
    TrainerStarted,
    UserFunctionRaised,
    VerdictGiven,
    WeightsApplied,
)
from messages.ledger import not_finite_in
from runtime.ledger.books import sum_line
from runtime.ledger.changes import AttemptEnded, Change, Closed
from runtime.ledger.fold import FOLD_VERSION, LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.snapshots import content_of
from runtime.ledger.steps import Settled, TakenBack
from runtime.report.fold.account import KEEP, Account
from runtime.report.fold.spans import Span
from runtime.report.group_numbers import (
    FAILED,
    CompletedNumbers,
    EqualScores,
    Samples,
    is_left_out,
    is_ungraded,
    mean_of,
)
from runtime.report.lines import Failures, failure_in, line_of, masked_line, step_line
from runtime.report.rows import (
    STEP,
    MetricRow,
    drop_metrics,
    eval_means,
    group_metrics,
    not_asked,
    rewards_of,
    ungraded_shares,
)
from runtime.report.summary import Result, num_of_end, summary_lines
from runtime.report.times import again_text, closing_line, progress_line, time_metrics
from runtime.util.formatting import count_of, number

FOLDED = frozenset(LEDGER_EVENTS)
REASONS_UNTRAINED = {
    "not_finite": "their loss, or the gradient of their optimizer step, was not finite",
    "too_long": "they are over train.max_tokens_per_gpu",
    "invalid": "their token ids, log-probs or counts cannot be true (sample_invalid in the trainer's log)",
}
LOSSES = ("train/sft_loss", "train/preference_loss")  # only steps on demonstrations and pairs have one of them


class Line(msgspec.Struct, frozen=True):
    """A line to print."""

    text: str


class RowDone(msgspec.Struct, frozen=True):
    """The metrics of one step: of its training, and again with those of its evaluation, once that has ended."""

    row: MetricRow


class SampleShown(msgspec.Struct, frozen=True):
    """A completed group whose first sample is to be shown in full."""

    which: str  # "first" of this start, "last" of the run, "typical" of equal scores
    seq: int  # log sequence of its GroupCompleted
    graded: bool = True  # it was generated and scored
    why: tuple[str, ...] = ()  # lines before it
    causes: tuple[str, ...] = ()  # lines after it


Notice = Line | RowDone | SampleShown


class Report(msgspec.Struct):
    """Folds the events of a run, from the first on, into the report. Plain data, stored in an observer's snapshots."""

    run: str = ""  # its name
    num_steps: int = 0  # planned train steps
    started: float = 0.0  # Unix time of the command
    step_groups: int = 0  # prompt groups of a train step; 0: unknown
    graded: bool = True  # samples have scores, unlike demonstrations
    random_init: bool = False  # the model begins with random weights
    first_seq: int = 1  # log sequence of the first event of this start; clocks of two machines are not compared
    steps: int = 0  # trained train steps
    num_again: int = 0  # of them, steps that a restarted trainer has yet to train again
    finished: str | None = None  # reason
    rewards: list[float] = []  # mean per step
    losses: list[float] = []  # of steps on demonstrations
    evals: dict[str, float] = {}  # newest mean by set
    first_evals: dict[str, float] = {}
    tokens: int = 0
    version: int = 0
    account: Account = msgspec.field(default_factory=Account)
    _earlier_steps: int = 0  # of the steps, trained before the command
    _ledger: LedgerState = msgspec.field(default_factory=LedgerState)
    _numbers: CompletedNumbers = msgspec.field(default_factory=CompletedNumbers)
    _cited: set[int] = set()  # completion events that the initial state cites
    _tokens_so_far: int = 0  # generated since the newest step
    _failures: Failures = msgspec.field(default_factory=Failures)
    _scores: EqualScores = msgspec.field(default_factory=EqualScores)
    _first_rollout: float | None = None
    _row: MetricRow | None = None  # row of the newest step, which its evaluation may still complete
    _evaluated_row: MetricRow | None = None  # row of an older step whose evaluation still runs
    _dropped: dict[str, int] = {}  # counts at the newest row
    _num_failed: int = 0  # groups, at the newest row

    def __post_init__(self) -> None:
        self._scores.is_random = self.random_init

    @property
    def ledger(self) -> LedgerState:
        """The ledger as folded so far. The caller does not change it."""
        return self._ledger

    @property
    def open_row(self) -> MetricRow | None:
        """The row of the newest step, which an evaluation may still complete. The caller does not change it."""
        return self._row

    def begin(self, ledger: LedgerState) -> None:
        """Begin from a ledger state, because earlier events are not available."""
        self._ledger, self.version = ledger, ledger.version
        self._cited = {group.event_seq for group in ledger.groups.values()}
        self.steps = self._earlier_steps = ledger.trained_steps
        self._scores.is_over = True  # the first samples are among the earlier events

    def apply(
        self,
        event: Message,
        seq: int,
        time: float,
        samples: Samples | None = None,
        spans: list[Span] | None = None,
        changes: list[Change] | None = None,
    ) -> list[Notice]:
        """Fold the next event of the log.

        Args:
            event: the event.
            seq: its log sequence.
            time: Unix time in seconds at which it was logged.
            samples: of a completed group, if the caller has read them.
            spans: gets those that the event ends.
            changes: gets what the event changes in the ledger.
        """
        if samples is None and isinstance(event, GroupCompleted):
            samples = Samples.of(event.samples)
        settled = self._fold(event, samples, seq, changes)
        began = self.account.evaluation
        self.account.apply(event, time, spans)
        match event:
            case GroupCompleted() if samples is not None:
                return self._complete(event, samples, seq, time)
            case VerdictGiven() if event.outcome is KEEP:  # one of the commonest
                return []
            case BatchTrained():
                return self._train(event, settled, seq, time)
            case TrainerStarted():
                return self._begin_again(event, settled)
            case BatchReady():
                return self._batch(event, seq)
            case EvalCompleted():
                self._tokens_so_far += sum([sample.response_len for sample in event.samples])
                reasons = {sample.reason for sample in event.samples if sample.reward is None and sample.reason}
                failures = (f"evaluation set {event.set}: sample without a grade: {why}" for why in sorted(reasons))
                return [Line(text) for reason in failures for text in self._failures.lines(reason, self.run)]
            case EvalEnded():
                failures = (f"evaluation set {name}: {why}" for name, why in event.failed.items())
                lines = [Line(text) for reason in failures for text in self._failures.lines(reason, self.run)]
                took_s = None if began is None else time - began[1]
                return [*lines, *self._evaluate(event, time, f" ({_weights_of(event)})", took_s=took_s)]
            case UserFunctionRaised():
                return [Line(text) for text in self._failures.traceback(event)]
            case PairsEvaluated():
                return self._evaluate(event, time, took_s=event.took_s)
            case RunFinished():
                self.finished = event.reason
                self.close()
                return []
            case WeightsApplied():
                self.version = max(self.version, event.version)
                return []
            case _:
                return self._lines_of(event)

    def _fold(self, event: Message, samples: Samples | None, seq: int, changes: list[Change] | None) -> list[Settled]:
        """Fold an event into the ledger; return the batches that it settles as trained."""
        if seq in self._cited and isinstance(event, GroupCompleted) and samples is not None:
            self._numbers.complete(event, samples, seq)
        if type(event) not in FOLDED:
            return []
        settled: list[Settled] = []
        for change in fold(self._ledger, event, seq):
            if changes is not None:
                changes.append(change)
            match change:
                case AttemptEnded(event=GroupCompleted() as completed) if samples is not None:
                    self._numbers.complete(completed, samples, seq)
                case Closed():
                    self._numbers.take([change.group.event_seq])
                case TakenBack():
                    self._numbers.take(ref.event_seq for ref in change.lost)
                case Settled():
                    settled.append(change)
                case _:
                    pass
        return settled

    def _lines_of(self, event: Message) -> list[Notice]:
        failure, line = failure_in(event), line_of(event)
        texts = self._failures.lines(failure, self.run) if failure is not None else [line] if line is not None else []
        return [Line(text) for text in texts]

    def _batch(self, event: BatchReady, seq: int) -> list[Notice]:
        is_first = event.index == 0  # one sample is shown of a batch
        if not is_first or event.step + 1 != self.num_steps or seq < self.first_seq or not event.groups:
            return []
        return [SampleShown("last", max(ref.event_seq for ref in event.groups), graded=self.graded)]

    def close(self) -> None:
        """Take the newest row for complete, unless its evaluation still runs."""
        row, self._row = self._row, None
        running = self._ledger.evaluation
        if row is not None and running is not None and running.step == row["step"]:
            self._evaluated_row = row

    def result(self, now: float) -> Result:
        """Return the result as of `now`, a Unix time in seconds."""
        return Result(
            run=self.run,
            steps=self.steps,
            reward_first=None if self.losses else mean_of(self.rewards[: num_of_end(self.rewards)]),
            reward_last=None if self.losses else mean_of(self.rewards[-num_of_end(self.rewards) :]),
            loss_first=mean_of(self.losses[: num_of_end(self.losses)]),
            loss_last=mean_of(self.losses[-num_of_end(self.losses) :]),
            eval_last=next(iter(self.evals.values()), None),
            seconds=round(now - self.started, 3),
            time_to_first_rollout_s=self._first_rollout and round(self._first_rollout - self.started, 3),
            tokens=self.tokens,
            groups=msgspec.structs.asdict(self._ledger.books()),
        )

    def summary(self, now: float) -> list[str]:
        """Return the result as of `now` as lines."""
        lines = summary_lines(
            self.result(now),
            self._ledger,
            num_steps=self.num_steps,
            earlier_steps=self._earlier_steps,
            curves={"reward": self.rewards, "loss": self.losses},
            evals={name: (self.first_evals[name], value) for name, value in self.evals.items()},
        )
        return [*lines, *closing_line(self.account)]

    def progress_line(self, now: float) -> str:
        """Return the progress of the current step or evaluation as of `now`."""
        return progress_line(
            self._ledger,
            self.account,
            step=self.steps + 1,
            num_again=self.num_again,
            num_steps=self.num_steps,
            step_groups=self.step_groups,
            tokens=self._tokens_so_far,
            started=self.started,
            now=now,
        )

    def books_line(self, *, brief: bool = False) -> str:
        """Return the group counts of the ledger as a sum; with `brief`, without zeros."""
        return sum_line(self._ledger.books(), brief=brief)

    def _train(self, event: BatchTrained, settled: Sequence[Settled], seq: int, time: float) -> list[Notice]:
        self._tokens_so_far = 0
        self.num_again = max(0, self.steps - event.step - 1)
        if not settled:
            return []  # replayed after a crash, or a duplicate event
        groups = self._numbers.take(ref.event_seq for ref in settled[0].groups)
        self.close()
        self.steps = max(self.steps, event.step + 1)
        if seq < self.first_seq:
            self._earlier_steps = self.steps
        self.tokens += event.num_tokens
        metrics = event.metrics | not_finite_in(event)
        self.losses += [metrics[name] for name in LOSSES if name in metrics]
        self.rewards.append(mean_of(rewards_of(groups)) or 0.0)
        row: MetricRow = {"step": event.step + 1, "time": time, "rollout/step": event.step}
        row |= group_metrics(groups, graded=not self.losses) | drop_metrics(self._ledger.dropped, self._dropped)
        row |= metrics | time_metrics(self.account, event)
        row |= {"train/num_tokens": event.num_tokens, "weights/version": self.version}
        row |= {f"groups/{name}": count for name, count in msgspec.structs.asdict(self._ledger.books()).items()}
        row |= self._failed_share(len(groups))
        self._row, self._dropped = row, dict(self._ledger.dropped)
        masked = masked_line(metrics)
        lines = [Line(masked)] if masked is not None else []
        return [Line(self._step_line(row)), RowDone(dict(row)), *lines, *self._untrained(event)]

    def _failed_share(self, trained: int) -> MetricRow:
        """Return the share of groups that failed since the step before, from the first failure of the run on."""
        before, self._num_failed = self._num_failed, self._ledger.books().failed
        failed = self._num_failed - before
        ended = failed + trained + sum(self._ledger.dropped.values()) - sum(self._dropped.values())
        return {"rollout/failed_group_ratio": failed / ended} if self._num_failed and ended > 0 else {}

    def _untrained(self, event: BatchTrained) -> list[Notice]:
        reasons = sorted({item.reason for item in event.untrained})
        texts = [f"samples left no gradient: {REASONS_UNTRAINED.get(reason, reason)}" for reason in reasons]
        return [Line(line) for text in texts for line in self._failures.lines(text, self.run)]

    def _step_line(self, row: MetricRow) -> str:
        return step_line(
            row,
            num_steps=self.num_steps,
            rewards=self.rewards,
            losses=self.losses,
            evals=self.evals,
            books=self.books_line(brief=True),
            step_times_s=self.account.recent_s,
        )

    def _begin_again(self, event: TrainerStarted, settled: Sequence[Settled]) -> list[Notice]:
        """Settle steps that the loaded checkpoint contains although their batch.trained is missing."""
        for change in settled:
            groups = self._numbers.take(ref.event_seq for ref in change.groups)
            self.rewards.append(mean_of(rewards_of(groups)) or 0.0)
        self.steps = max(self.steps, event.step)
        self.num_again = self.steps - event.step
        again = again_text(self.steps, self.num_again)
        if not event.step and not again:
            return []
        return [Line(f"trainer continues after step {event.step}{again and f': {again}'}")]

    def _complete(self, event: GroupCompleted, samples: Samples, seq: int, time: float) -> list[Notice]:
        self._tokens_so_far += sum(samples.response_len)
        has_odd = samples.has_reasons or FAILED in samples.status
        odd = [s for s in event.samples if s.reason is not None or is_left_out(s)] if has_odd else []
        ungraded = [sample for sample in odd if is_ungraded(sample)]
        reasons = {f"no score, reward {sample.reward:g} instead: {sample.reason}" for sample in ungraded}
        reasons |= {f"sample left out: {sample.reason}" for sample in odd if is_left_out(sample)}
        lines: list[Notice] = [
            Line(text) for reason in sorted(reasons) for text in self._failures.lines(reason, self.run)
        ]
        if self.graded and self._scores.take(event.samples, self.steps) and seq >= self.first_seq:
            lines.append(SampleShown("typical", seq, why=self._scores.why, causes=self._scores.causes))
        if self._first_rollout is not None or seq < self.first_seq:
            return lines
        self._first_rollout = time
        return [*lines, SampleShown("first", seq, graded=self.graded)]

    def _evaluate(
        self, event: EvalEnded | PairsEvaluated, time: float, weights: str = "", *, took_s: float | None
    ) -> list[Notice]:
        all_metrics = event.metrics | not_finite_in(event)
        means = eval_means(all_metrics)
        self.evals |= means
        self.first_evals = means | self.first_evals
        metrics = {STEP: event.step, **all_metrics}
        if took_s is not None:
            metrics["perf/eval_time"] = took_s
        ungraded = ungraded_shares(all_metrics)
        texts = [
            f"{name} {number(value)}" + (f" ({ungraded[name]:.0%} without a grade)" if name in ungraded else "")
            for name, value in means.items()
        ]
        texts += [f"{name}: no sample has a grade" for name in ungraded if name not in means]
        texts += [f"{name}: {count_of(int(left), 'prompt')} not asked" for name, left in not_asked(all_metrics).items()]
        shown = ", ".join(texts) or "no metrics"
        line = Line(f"evaluation after step {event.step}{weights}: {shown}")
        if self._row is not None and self._row["step"] == event.step:
            self._row |= metrics
            return [line, RowDone(dict(self._row))]
        before, self._evaluated_row = self._evaluated_row, None
        if event.step == 0:
            before = {"step": 0, "time": time}
        elif before is None or before["step"] != event.step:
            return [line]  # its row was written before this start
        return [line, RowDone(before | metrics)]


def ledger_in(event: Message) -> LedgerState | None:
    """Return the ledger that an event holds: that of a snapshot, if this version can fold on from it."""
    if not isinstance(event, SnapshotTaken) or not event.content or event.fold_version != FOLD_VERSION:
        return None
    return content_of(event)


def _weights_of(event: EvalEnded) -> str:
    """Name the weights of an evaluation on engines."""
    begun = f"weights v{event.version}"
    return f"begun with {begun}, ended with v{event.newest_version}" if event.newest_version else begun
