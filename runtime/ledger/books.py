"""Summary of a run's ledger for people: group counts, and the groups of each step. A pure fold of the log."""

from collections.abc import Iterator

import msgspec

from messages import Message, RunStalled
from runtime.ledger.fold import LEDGER_EVENTS, Books, LedgerState, fold
from runtime.ledger.steps import Settled
from runtime.util.formatting import count_of, duration


class EvaluationProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A running evaluation."""

    step: int
    version: int
    done: dict[str, int]  # completed items by set
    items: dict[str, int]


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The run makes no progress."""

    idle_s: float
    waiting: dict[str, str]  # by instance: what it waits for


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of a run as one JSON object."""

    run: str
    live: bool  # whether it was read from the run's bus
    events: int  # log sequence of the newest event read
    books: Books
    dropped: dict[str, int]  # by reason
    failed: dict[str, int]
    untrained: dict[str, int]  # samples of trained batches that contributed no gradient, by reason
    baselines: int  # greedy samples of completed groups, which are scored and not trained
    steps: int  # trained steps
    trained: tuple[tuple[int, tuple[int, ...]], ...]  # step and its groups, in the order of settlement
    skipped: tuple[tuple[int, tuple[int, ...]], ...]  # step and its groups that contributed no gradient
    round: int  # the open round: number of the next batch, more by the rounds that a person halted
    halted_by_hand: int  # rounds that a person halted so far
    version: int  # newest announced weight version, 0 before the first
    version_step: int  # train steps in these weights
    checkpoint_step: int
    evaluation: EvaluationProgress | None
    evaluated_step: int | None  # newest step with a finished evaluation
    finished: str | None  # reason
    gave_up: str | None  # reason; None again once a buffer starts
    stalled: Stall | None  # if no event came after the report: what each instance waits for


class LedgerReport:
    """Folds the events of a run into its summary."""

    def __init__(self) -> None:
        self.state = LedgerState()
        self.trained: list[tuple[int, tuple[int, ...]]] = []
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.first_seq = 0  # first sequence read; 0: none yet
        self._stalled: Stall | None = None

    def begin(self, state: LedgerState) -> None:
        """Start in the middle of the log, from a folded state."""
        self.state = state

    def take(self, event: Message, seq: int) -> None:
        """Take the next event of the log.

        Args:
            event: any event of the run.
            seq: its sequence in the log.
        """
        self.first_seq = self.first_seq or seq
        self._stalled = Stall(idle_s=event.idle_s, waiting=event.waiting) if isinstance(event, RunStalled) else None
        if not isinstance(event, LEDGER_EVENTS):
            return
        for change in fold(self.state, event, seq):
            if isinstance(change, Settled):
                self._settle(change)

    def _settle(self, change: Settled) -> None:
        groups = [ref.group_id for ref in change.groups]
        self.trained.append((change.step, tuple(group for group in groups if group not in change.skipped)))
        if skipped := tuple(group for group in groups if group in change.skipped):
            self.skipped.append((change.step, skipped))

    def summary(self, run: str, *, live: bool) -> LedgerSummary:
        """Return the summary of the ledger after the newest event."""
        state = self.state
        return LedgerSummary(
            run=run,
            live=live,
            events=state.last_seq,
            books=state.books(),
            dropped=state.dropped,
            failed=state.failed,
            untrained=state.untrained,
            baselines=state.baselines,
            steps=state.trained_steps,
            trained=tuple(self.trained),
            skipped=tuple(self.skipped),
            round=state.open_round,
            halted_by_hand=state.rounds_ahead,
            version=state.version,
            version_step=state.version_step,
            checkpoint_step=state.checkpoint_step,
            evaluation=self._evaluation(),
            evaluated_step=state.eval_step if state.eval_step >= 0 else None,
            finished=state.finished,
            gave_up=state.gave_up,
            stalled=self._stalled,
        )

    def _evaluation(self) -> EvaluationProgress | None:
        running = self.state.evaluation
        if running is None:
            return None
        done = {name: len(items) for name, items in running.items.items()}
        return EvaluationProgress(step=running.step, version=running.version, done=done, items=running.sizes)


def sum_line(books: Books, *, brief: bool = False) -> str:
    """Format the group counts as a sum; `brief` omits zeros."""
    counts = msgspec.structs.asdict(books)
    issued = counts.pop("issued")
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count or not brief]
    return f"{issued} issued = " + " + ".join(parts)


def lines_of(summary: LedgerSummary) -> Iterator[str]:
    """Format the summary as lines for people."""
    warning = "" if summary.books.closed else "  THE BOOKS DO NOT CLOSE"
    yield f"run         {summary.run}, {_standing(summary)}"
    yield f"groups      {sum_line(summary.books)}{warning}"
    for what, tally in (("dropped", summary.dropped), ("failed", summary.failed)):
        yield from (f"            {what}: {count} {reason}" for reason, count in sorted(tally.items()))
    yield from (f"            {skipped_text(reason, count)}" for reason, count in sorted(summary.untrained.items()))
    if summary.baselines:
        yield f"baselines   {count_of(summary.baselines, 'greedy sample')} scored, not trained"
    by_hand = f"; {count_of(summary.halted_by_hand, 'round')} halted by hand" if summary.halted_by_hand else ""
    yield f"steps       {summary.steps} trained; round {summary.round} is open{by_hand}"
    yield f"weights     {f'v{summary.version} of step {summary.version_step}' if summary.version else 'none yet'}"
    yield f"checkpoint  {f'of step {summary.checkpoint_step}' if summary.checkpoint_step else 'none yet'}"
    yield f"evaluation  {_evaluation(summary)}"
    if summary.stalled is not None and summary.finished is None:
        yield f"stalled     nothing happened for {duration(summary.stalled.idle_s)}"
        yield from (f"            {name}: {what}" for name, what in summary.stalled.waiting.items())


def skipped_text(reason: str, count: int) -> str:
    """Format the number of samples that contributed no gradient as one line."""
    return f"skipped: {count_of(count, 'sample')} {reason}"


def stall_text(event: RunStalled) -> str:
    """Format a stall as one line."""
    waiting = "; ".join(f"{name}: {what}" for name, what in event.waiting.items())
    return f"nothing happened for {duration(event.idle_s)}: {waiting or 'no actor answers'}"


def _standing(summary: LedgerSummary) -> str:
    if summary.finished is not None:
        return f"finished: {summary.finished}"
    if summary.gave_up is not None:
        return f"gave up: {summary.gave_up}"
    return f"not finished ({'read from its bus' if summary.live else 'no node daemon runs it'})"


def _evaluation(summary: LedgerSummary) -> str:
    running, newest = summary.evaluation, summary.evaluated_step
    ended = "none yet" if newest is None else f"ended after step {newest}"
    if running is None:
        return ended
    parts = [f"{running.done[name]} of {count_of(items, 'item')} of {name}" for name, items in running.items.items()]
    return f"runs after step {running.step} (weights v{running.version}): {', '.join(parts)}; {ended}"
