"""What a person asks of a run's ledger: its books, and which groups each step trained. A fold of the log. Pure."""

from collections.abc import Iterator

import msgspec

from messages import Message, RunStalled
from runtime.ledger.fold import LEDGER_EVENTS, Books, LedgerState, fold
from runtime.ledger.steps import Settled
from runtime.wording import count_of, duration


class EvaluationProgress(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that runs."""

    step: int
    version: int
    done: dict[str, int]  # ended items by set
    items: dict[str, int]


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing happens."""

    idle_s: float
    waiting: dict[str, str]  # by instance


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of a run as one JSON object."""

    run: str
    live: bool  # read from the run's bus
    events: int  # sequence of the newest event that the ledger read
    books: Books
    dropped: dict[str, int]  # by reason
    failed: dict[str, int]
    untrained: dict[str, int]  # samples of trained batches that left no gradient, by reason
    steps: int  # trained
    trained: tuple[tuple[int, tuple[int, ...]], ...]  # step and its groups, in the order in which they were settled
    skipped: tuple[tuple[int, tuple[int, ...]], ...]  # step and those of its groups that left no gradient
    round: int  # the open one; number of the next batch
    halted: bool  # its generation is ended
    version: int  # newest announced weights, 0 before the first
    version_step: int  # train steps that they contain
    checkpoint_step: int
    evaluation: EvaluationProgress | None
    evaluated_step: int | None  # newest step whose evaluation ended
    finished: str | None  # reason
    gave_up: str | None  # reason; until a buffer starts again
    stalled: Stall | None  # who waits for what, if nothing has happened since it was asked


class LedgerReport:
    """Folds the events of a run into its books."""

    def __init__(self) -> None:
        self.state = LedgerState()
        self.trained: list[tuple[int, tuple[int, ...]]] = []
        self.skipped: list[tuple[int, tuple[int, ...]]] = []
        self.first_seq = 0  # of the log; 0 while nothing was read
        self._stalled: Stall | None = None

    def begin(self, state: LedgerState) -> None:
        """Begin in the middle: what came before can only be had as the state of the ledger."""
        self.state = state

    def take(self, event: Message, seq: int) -> None:
        """Take the next event of the log.

        Args:
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
        """The ledger as of the newest event."""
        state = self.state
        return LedgerSummary(
            run=run,
            live=live,
            events=state.last_seq,
            books=state.books(),
            dropped=state.dropped,
            failed=state.failed,
            untrained=state.untrained,
            steps=state.trained_steps,
            trained=tuple(self.trained),
            skipped=tuple(self.skipped),
            round=state.round,
            halted=state.halted_round >= state.round,
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
    """The books as a sum; in brief without its zeros."""
    counts = msgspec.structs.asdict(books)
    issued = counts.pop("issued")
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count or not brief]
    return f"{issued} issued = " + " + ".join(parts)


def lines_of(summary: LedgerSummary) -> Iterator[str]:
    """The summary for people."""
    warning = "" if summary.books.closed else "  THE BOOKS DO NOT CLOSE"
    yield f"run         {summary.run}, {_standing(summary)}"
    yield f"groups      {sum_line(summary.books)}{warning}"
    for what, tally in (("dropped", summary.dropped), ("failed", summary.failed)):
        yield from (f"            {what}: {count} {reason}" for reason, count in sorted(tally.items()))
    yield from (f"            {untrained_words(reason, count)}" for reason, count in sorted(summary.untrained.items()))
    yield f"steps       {summary.steps} trained; round {summary.round} is {'halted' if summary.halted else 'open'}"
    yield f"weights     {f'v{summary.version} of step {summary.version_step}' if summary.version else 'none yet'}"
    yield f"checkpoint  {f'of step {summary.checkpoint_step}' if summary.checkpoint_step else 'none yet'}"
    yield f"evaluation  {_evaluation(summary)}"
    if summary.stalled is not None and summary.finished is None:
        yield f"stalled     nothing happened for {duration(summary.stalled.idle_s)}"
        yield from (f"            {name}: {what}" for name, what in summary.stalled.waiting.items())


def untrained_words(reason: str, count: int) -> str:
    """In one line, how many samples of batches left no gradient."""
    return f"untrained: {count_of(count, 'sample')} {reason}"


def stall_words(event: RunStalled) -> str:
    """In one line, what nothing happens for."""
    waiting = "; ".join(f"{name}: {what}" for name, what in event.waiting.items())
    return f"nothing happened for {duration(event.idle_s)}: {waiting or 'nobody is there'}"


def _standing(summary: LedgerSummary) -> str:
    if summary.finished is not None:
        return f"finished: {summary.finished}"
    if summary.gave_up is not None:
        return f"gave up: {summary.gave_up}"
    return f"not finished ({'read from its bus' if summary.live else 'nothing runs it'})"


def _evaluation(summary: LedgerSummary) -> str:
    running, newest = summary.evaluation, summary.evaluated_step
    ended = "none yet" if newest is None else f"ended after step {newest}"
    if running is None:
        return ended
    parts = [f"{running.done[name]} of {count_of(items, 'item')} of {name}" for name, items in running.items.items()]
    return f"runs after step {running.step} (weights v{running.version}): {', '.join(parts)}; {ended}"
