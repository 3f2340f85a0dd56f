"""What an observer shows of a run: rows, states, groups by state over time, endings, time breakdown. A pure fold.

Its memory is bounded: curves and the course of groups are thinned, and lists keep their newest entries.
"""

from typing import Any, Final, Generic, TypeVar

import msgspec

from actors.observer.advice import Adviser
from actors.observer.counts import Counts
from actors.observer.timeline import Timeline
from messages import (
    ActorExited,
    ActorStarted,
    BufferStarted,
    EngineLoad,
    EngineStateChanged,
    EvalCompleted,
    EventLoopBlocked,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    RunFailed,
    RunFinished,
    RunStalled,
    RunStopped,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
    WeightsProgressed,
)
from runtime.ledger.changes import Change
from runtime.ledger.state import Books, LedgerState, Stage
from runtime.report.fold.account import Account
from runtime.report.fold.spans import PARTS, Span, StepTime
from runtime.report.group_numbers import Samples
from runtime.report.report import Line, Report, RowDone, ledger_in
from runtime.report.rows import MetricRow, spelled

KEPT_ROWS: Final = 1_000  # at twice as many every second one is left out, and every second new one
KEPT_COURSE: Final = 1_000  # samples of the groups by state
KEPT_LINES: Final = 200
KEPT_ENDINGS: Final = 200
SHOWN_GROUPS: Final = 50  # live groups of each stage
COURSE_EVERY_S: Final = 1.0  # at first


CoursePoint = tuple[int | float, ...]  # time, then the number of groups by state, in the order of Books
ItemT = TypeVar("ItemT")


class Process(msgspec.Struct):
    """A process of the run, as its node daemon last reported it."""

    name: str
    node: str
    pid: int
    since: float  # Unix time
    restarts: int = 0
    is_up: bool = True
    reason: str = ""  # why it ended


class EngineView(msgspec.Struct):
    """An engine, as its rollout actor last reported it."""

    name: str
    state: str = ""
    version: int = 0
    since: float = 0.0
    reason: str = ""
    update_s: float = 0.0  # of its newest weight update
    pause_s: float = 0.0
    # Its load when it ended a group last: samples of the rollout actor; requests of all clients and share of its KV
    # cache, as it reported them last.
    samples: int = 0
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    load_at: float = 0.0  # 0: unknown

    def note_load(self, load: EngineLoad, time: float) -> None:
        """Keep the load that an event reports."""
        self.samples, self.running, self.waiting, self.cache_usage = (
            load.samples,
            load.running,
            load.waiting,
            load.cache_usage,
        )
        self.load_at = time


class Ending(msgspec.Struct, frozen=True):
    """Groups that were dropped or failed."""

    time: float
    outcome: str
    reason: str
    group_ids: tuple[int, ...]


class Thinned(msgspec.Struct, Generic[ItemT]):
    """A growing list of bounded length: when it is full, every second entry is left out, and of new ones too."""

    bound: int
    items: list[ItemT] = []
    num_thinned: int = 0  # how often
    num_seen: int = 0

    def add(self, item: ItemT) -> bool:
        """Add an entry, or leave it out. Return whether the list changed."""
        self.num_seen += 1
        if self.num_seen % 2**self.num_thinned:
            return False
        self.items.append(item)
        if len(self.items) >= 2 * self.bound:
            self.items = self.items[1::2]
            self.num_thinned += 1
        return True


class Observed(msgspec.Struct):
    """Folds the events of a run, from the first one on, into what people look at.

    It is plain data: each field is part of a snapshot, from which another process goes on (`encoded`, `decoded`).
    """

    run: str  # its name
    num_steps: int = 0  # planned train steps; 0: unknown
    step_groups: int = 0  # prompt groups of a train step; 0: unknown
    kept_rows: int = KEPT_ROWS  # steps that it keeps at least
    num_events: int = 0
    first_seq: int = 0
    seq: int = 0  # of the newest event
    time: float = 0.0  # of the newest event
    ended: str = ""  # how the run ended, if nothing happened since
    has_begun: bool = False  # a sample was completed since the run was started last
    waiting: dict[str, str] = {}  # what each process waits for, if nothing happens
    stalled_s: float = 0.0  # without an event, when the run was found stalled; 0: it is not
    problems: list[str] = []  # why events are missing, as the reader of the log says
    rows: Thinned[MetricRow] = msgspec.field(default_factory=lambda: Thinned[MetricRow](KEPT_ROWS))
    course: Thinned[CoursePoint] = msgspec.field(default_factory=lambda: Thinned[CoursePoint](KEPT_COURSE))
    adviser: Adviser = msgspec.field(default_factory=Adviser)
    timeline: Timeline = msgspec.field(default_factory=Timeline)
    step_times: Thinned[StepTime] = msgspec.field(default_factory=lambda: Thinned[StepTime](KEPT_ROWS))
    counts: Counts = msgspec.field(default_factory=Counts)
    spans: list[Span] = []  # that the newest event ended
    _changed: dict[int, int] = {}  # sequence of the event that last changed a kept row, by its step
    _newest_row: int = 0  # step of it
    _report: Report = msgspec.field(default_factory=Report)
    _processes: dict[str, Process] = {}
    _engines: dict[str, EngineView] = {}
    _lines: list[tuple[float, str]] = []
    _endings: list[Ending] = []
    _announced: tuple[int, float] = (0, 0.0)
    _course_at: float = 0.0

    def __post_init__(self) -> None:
        self.rows.bound = self.step_times.bound = self.kept_rows
        report = self._report
        report.run, report.num_steps, report.step_groups = self.run, self.num_steps, self.step_groups

    def apply(self, event: Message, seq: int, time: float, changes: list[Change] | None = None) -> list[MetricRow]:
        """Fold the next event; return the rows of metrics that it completes.

        Args:
            event: the event.
            seq: its log sequence.
            time: Unix time in seconds at which it was logged.
            changes: gets what the event changes in the ledger.
        """
        if not self.first_seq:
            self.first_seq, self._report.started = seq, time
        self.num_events, self.seq, self.time = self.num_events + 1, seq, time
        if self.first_seq > 1:
            self._begin_late(event)
        if not isinstance(event, EventLoopBlocked | WeightsProgressed):  # they are no progress of the run
            self.waiting, self.stalled_s = {}, 0.0
        samples = Samples.of(event.samples) if isinstance(event, GroupCompleted) else None
        rows: list[MetricRow] = []
        spans: list[Span] = []
        for notice in self._report.apply(event, seq, time, samples, spans, changes):
            match notice:
                case Line(text):
                    self._lines.append((time, text))
                    del self._lines[:-KEPT_LINES]
                case RowDone(row):
                    self._put(row)
                    self.counts.take(row)
                    rows.append(row)
                case _:
                    pass
        step = self.account.step
        if step is not None:
            self.step_times.add(step)
        self.adviser.apply(event, step, samples)
        self.timeline.take(spans, step)
        self.spans = spans
        self._note(event, time)
        self.counts.apply(event, samples)
        if time - self._course_at >= COURSE_EVERY_S:
            self._course_at = time
            self.course.add((time, *msgspec.structs.astuple(self._report.ledger.books())))
        return rows

    def _begin_late(self, event: Message) -> None:
        """Take the ledger from the first snapshot, if the log does not begin with the run."""
        if not self._report.ledger.groups and (state := ledger_in(event)) is not None:
            self._report.begin(state)

    def _put(self, row: MetricRow) -> None:
        """Add a row; a late evaluation completes the row of its step, unless that was left out."""
        step, rows = row["step"], self.rows.items
        if step in self._changed:
            index = next(index for index, known in enumerate(rows) if known["step"] == step)
            rows[index], self._changed[step] = row, self.seq
        elif step > self._newest_row or step == 0:
            self._newest_row = max(self._newest_row, step)
            if not self.rows.add(row):
                return
            self._changed[step] = self.seq
            if len(self._changed) > len(self.rows.items):
                kept = {known["step"] for known in self.rows.items}
                self._changed = {known: seq for known, seq in self._changed.items() if known in kept}

    def _note(self, event: Message, time: float) -> None:
        match event:
            case VerdictGiven(outcome=Outcome.KEEP):  # one of the commonest
                pass
            case GroupCompleted():
                self.has_begun = True
                last = event.last_sample
                if last.load is not None:
                    self._engines.setdefault(last.engine, EngineView(last.engine)).note_load(last.load, time)
            case ActorStarted():
                self._processes[event.actor] = Process(event.actor, event.node, event.pid, time, event.restarts)
            case ActorExited():
                known = self._processes.setdefault(event.actor, Process(event.actor, event.node, event.pid, time))
                known.is_up, known.since, known.reason = False, time, event.reason
            case EngineStateChanged():
                engine = self._engines.setdefault(event.engine, EngineView(event.engine))
                engine.state, engine.version = event.new.value, event.version
                engine.since, engine.reason = time, event.reason
            case WeightsAnnounced():
                self._announced = event.version, time
            case WeightsApplied():
                for update in event.engines:
                    engine = self._engines.setdefault(update.engine, EngineView(update.engine))
                    engine.version, engine.update_s, engine.pause_s = event.version, update.took_s, update.pause_s
            case GroupsClosed():
                self._end(time, event.outcome, event.reason, event.group_ids[:SHOWN_GROUPS])
            case VerdictGiven(outcome=Outcome.DROP | Outcome.FAILED):
                outcome = "dropped" if event.outcome is Outcome.DROP else "failed"
                self._end(time, outcome, event.reason or "", (event.group_id,))
            case GroupFailed():
                self._end(time, "failed", event.reason, (event.group_id,))
            case EvalCompleted():
                self.has_begun = True
            case BufferStarted() | GroupsIssued():
                self.ended = ""
                self.has_begun = self.has_begun and not isinstance(event, BufferStarted)
            case RunStalled():
                self.waiting, self.stalled_s = dict(event.waiting), event.idle_s
            case RunFinished() | RunFailed():
                self.ended = f"{'finished' if isinstance(event, RunFinished) else 'failed'}: {event.reason}"
            case RunStopped():
                self.ended = f"stopped: {event.reason}"
            case _:
                pass

    def _end(self, time: float, outcome: str, reason: str, group_ids: tuple[int, ...]) -> None:
        self._endings.append(Ending(time, outcome, reason, group_ids))
        del self._endings[:-KEPT_ENDINGS]

    # snapshots

    def encoded(self) -> bytes:
        """The state as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decoded(cls, content: bytes) -> "Observed":
        """Return the state that `encoded` returned.

        Raises:
            ValueError: the bytes hold no such state.
        """
        observed = msgspec.msgpack.decode(content, type=cls)
        times = {(step.step, step.end): step for step in observed.account.steps}  # both lists have the same objects
        observed.step_times.items = [times.get((step.step, step.end), step) for step in observed.step_times.items]
        return observed

    def become(self, other: "Observed") -> None:
        """Take over the state of another fold, which is not used any more."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))

    # what a page shows: values that JSON can hold

    @property
    def account(self) -> Account:
        """Where the time went. The caller does not change it."""
        return self._report.account

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        return self._report.steps

    @property
    def num_restarts(self) -> int:
        """Number of restarts of processes."""
        return sum(process.restarts for process in self._processes.values())

    @property
    def ledger_state(self) -> LedgerState:
        """The ledger as folded so far. The caller does not change it."""
        return self._report.ledger

    def ledger_books(self) -> Books:
        """Return the number of groups by state."""
        return self._report.ledger.books()

    @property
    def open_row(self) -> MetricRow | None:
        """Metrics of the newest step, which an evaluation may still complete."""
        return self._report.open_row

    def curves(self, since: int = 0) -> list[MetricRow]:
        """The rows that events after a log sequence changed, with numbers that JSON cannot express as text."""
        newest = self._report.open_row
        rows = [row for row in self.rows.items if self._changed[row["step"]] > since]
        if newest is not None:  # always: `rows` leaves some out in a long run
            rows = [*(row for row in rows if row["step"] != newest["step"]), newest]
        return [{key: spelled(value) for key, value in row.items()} for row in rows]

    def metrics(self) -> dict[str, float]:
        """The newest value of each metric of train steps."""
        counts = Counts(metrics=dict(self.counts.metrics))
        if self._report.open_row is not None:
            counts.take(self._report.open_row)
        return {name: value for name, (_, value) in counts.metrics.items()}

    def now(self) -> dict[str, Any]:
        """The states as of the newest event."""
        report = self._report
        version, announced_at = self._announced
        return {
            "run": self.run,
            "seq": self.seq,
            "time": self.time,
            "num_events": self.num_events,
            "first_seq": self.first_seq,
            "ended": self.ended,
            "problems": self.problems,
            "step": report.steps,
            "num_steps": report.num_steps,
            "progress": report.progress_line(self.time),
            "weights": {"announced": version, "announced_at": announced_at, "held": report.version},
            "evaluation": self.account.evaluation,
            "waiting": self.waiting,
            "processes": [msgspec.to_builtins(process) for _, process in sorted(self._processes.items())],
            "engines": [msgspec.to_builtins(engine) for _, engine in sorted(self._engines.items())],
            "lines": self._lines,
            "course": self.course.items,
        }

    def ledger(self) -> dict[str, Any]:
        """Where the groups are."""
        ledger = self._report.ledger
        stages: dict[str, list[int]] = {stage: [] for stage in Stage}
        counts: dict[str, int] = dict.fromkeys(stages, 0)
        for group in ledger.groups.values():
            counts[group.stage] += 1
            if len(stages[group.stage]) < SHOWN_GROUPS:
                stages[group.stage].append(group.group_id)
        return {
            "books": msgspec.to_builtins(self.ledger_books()),
            "stages": {name: {"count": counts[name], "groups": stages[name]} for name in stages},
            "dropped": dict(ledger.dropped),
            "failed": dict(ledger.failed),
            "endings": [msgspec.to_builtins(ending) for ending in reversed(self._endings)],
        }

    def advice(self) -> list[dict[str, Any]]:
        """What slows the run or keeps it from learning."""
        return [msgspec.to_builtins(advice) for advice in self.adviser.advice(self.account)]

    def times(self, from_step: int = 0) -> dict[str, Any]:
        """The time breakdown of the run, and of its steps from one on."""
        steps = [step for step in self.step_times.items if step.step >= from_step]
        return {
            "parts": dict(PARTS),
            "totals": self.account.totals,
            "num_steps": self.account.num_steps,
            "stopped_s": self.account.stopped_s,
            "steps": [
                {"step": step.step, "what": step.what, "begin": step.begin, "parts": step.parts, "worst": step.worst}
                for step in steps
            ],
        }
