"""What an observer shows of a run: rows, states, groups by state over time, endings, time breakdown. A pure fold.

Its memory is bounded: curves and the course of groups are thinned, and lists keep their newest entries.
"""

from collections import deque
from typing import Any, Final

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    BufferStarted,
    EngineStateChanged,
    EvalEnded,
    EvalIssued,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    RunFailed,
    RunFinished,
    RunStalled,
    RunStopped,
    SnapshotTaken,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.ledger.fold import FOLD_VERSION
from runtime.ledger.snapshots import content_of
from runtime.ledger.state import Stage
from runtime.report.breakdown import PARTS, Breakdown
from runtime.report.report import Line, Report, RowDone
from runtime.report.rows import MetricRow, spelled

KEPT_ROWS: Final = 1_000  # at twice as many every second one is left out, and every second new one
KEPT_COURSE: Final = 1_000  # samples of the groups by state
KEPT_LINES: Final = 200
KEPT_ENDINGS: Final = 200
SHOWN_GROUPS: Final = 50  # live groups of each stage
COURSE_EVERY_S: Final = 1.0  # at first
STATES: Final = ("in_flight", "pooled", "ready", "trained", "skipped", "dropped", "failed")


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


class Ending(msgspec.Struct, frozen=True):
    """Groups that were dropped or failed."""

    time: float
    outcome: str
    reason: str
    group_ids: tuple[int, ...]


class Thinned:
    """A growing list of bounded length: when it is full, every second entry is left out, and of new ones too."""

    def __init__(self, bound: int) -> None:
        self.items: list[Any] = []
        self.num_thinned = 0  # how often
        self._bound = bound
        self._num_seen = 0

    def add(self, item: Any) -> None:
        """Add an entry, or leave it out."""
        self._num_seen += 1
        if self._num_seen % 2**self.num_thinned:
            return
        self.items.append(item)
        if len(self.items) >= 2 * self._bound:
            self.items = self.items[1::2]
            self.num_thinned += 1


class Observed:
    """Folds the events of a run, from the first one on, into what people look at.

    Args:
        run: its name.
        num_steps: planned train steps; 0: unknown.
        step_groups: prompt groups of a train step; 0: unknown.
        kept_rows: steps that it keeps at least.
    """

    def __init__(self, run: str, num_steps: int = 0, step_groups: int = 0, *, kept_rows: int = KEPT_ROWS) -> None:
        self.run = run
        self.num_events = 0
        self.first_seq = 0
        self.seq = 0  # of the newest event
        self.time = 0.0  # of the newest event
        self.ended = ""  # how the run ended, if nothing happened since
        self.problems: list[str] = []  # why events are missing, as the reader of the log says
        self.rows = Thinned(kept_rows)
        self._changed: dict[int, int] = {}  # sequence of the event that last changed a kept row, by its step
        self._newest_row = 0  # step of it
        self.course = Thinned(KEPT_COURSE)
        self.breakdown = Breakdown()
        self.step_times = Thinned(kept_rows)
        self._report = Report(run, num_steps, 0.0, step_groups=step_groups)
        self._processes: dict[str, Process] = {}
        self._engines: dict[str, EngineView] = {}
        self._lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self._endings: deque[Ending] = deque(maxlen=KEPT_ENDINGS)
        self._waiting: dict[str, str] = {}
        self._announced: tuple[int, float] = 0, 0.0
        self._evaluation: tuple[int, float] | None = None
        self._course_at = 0.0

    def apply(self, event: Message, seq: int, time: float) -> None:
        """Fold the next event.

        Args:
            event: the event.
            seq: its log sequence.
            time: Unix time in seconds at which it was logged.
        """
        if not self.first_seq:
            self.first_seq, self._report.started = seq, time
        self.num_events, self.seq, self.time = self.num_events + 1, seq, time
        self._begin_late(event, seq)
        self._waiting = {}
        for notice in self._report.apply(event, seq, time):
            match notice:
                case Line(text):
                    self._lines.append((time, text))
                case RowDone(row):
                    self._put(row)
                case _:
                    pass
        step = self.breakdown.apply(event, time)
        if step is not None:
            self.step_times.add(step)
        self._note(event, time)
        if time - self._course_at >= COURSE_EVERY_S:
            self._course_at = time
            self.course.add((time, *msgspec.structs.astuple(self._report.ledger.books())))

    def _begin_late(self, event: Message, seq: int) -> None:
        """Take the ledger from the first snapshot, if the log does not begin with the run."""
        late = self.first_seq > 1 and isinstance(event, SnapshotTaken) and not self._report.ledger.groups
        if late and isinstance(event, SnapshotTaken) and event.content and event.fold_version == FOLD_VERSION:
            self._report.begin(content_of(event))

    def _put(self, row: MetricRow) -> None:
        """Add a row; a late evaluation completes the row of its step, unless that was left out."""
        step, rows = row["step"], self.rows.items
        if step in self._changed:
            index = next(index for index, known in enumerate(rows) if known["step"] == step)
            rows[index], self._changed[step] = row, self.seq
        elif step > self._newest_row or step == 0:
            self._newest_row = max(self._newest_row, step)
            self.rows.add(row)
            kept = {known["step"] for known in self.rows.items}
            self._changed = {known: seq for known, seq in {**self._changed, step: self.seq}.items() if known in kept}

    def _note(self, event: Message, time: float) -> None:
        match event:
            case ActorStarted():
                self._processes[event.actor] = Process(event.actor, event.node, event.pid, time, event.restarts)
            case ActorExited():
                known = self._processes.setdefault(event.actor, Process(event.actor, event.node, event.pid, time))
                known.is_up, known.since, known.reason = False, time, event.reason
            case EngineStateChanged():
                engine = self._engines.setdefault(event.engine, EngineView(event.engine))
                engine.state, engine.version, engine.since, engine.reason = event.new, event.version, time, event.reason
            case WeightsAnnounced():
                self._announced = event.version, time
            case WeightsApplied():
                for update in event.engines:
                    engine = self._engines.setdefault(update.engine, EngineView(update.engine))
                    engine.version, engine.update_s, engine.pause_s = event.version, update.took_s, update.pause_s
            case GroupsClosed():
                self._endings.append(Ending(time, event.outcome, event.reason, event.group_ids[:SHOWN_GROUPS]))
            case VerdictGiven(outcome=Outcome.DROP | Outcome.FAILED):
                outcome = "dropped" if event.outcome is Outcome.DROP else "failed"
                self._endings.append(Ending(time, outcome, event.reason or "", (event.group_id,)))
            case GroupFailed():
                self._endings.append(Ending(time, "failed", event.reason, (event.group_id,)))
            case EvalIssued():
                self._evaluation = event.step, time
            case EvalEnded():
                self._evaluation = None
            case BufferStarted() | GroupsIssued():
                self.ended = ""
            case RunStalled():
                self._waiting = event.waiting
            case RunFinished() | RunFailed():
                self.ended = f"{'finished' if isinstance(event, RunFinished) else 'failed'}: {event.reason}"
            case RunStopped():
                self.ended = f"stopped: {event.reason}"
            case _:
                pass

    # what a page shows: values that JSON can hold

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        return self._report.steps

    def curves(self, since: int = 0) -> list[MetricRow]:
        """The rows that events after a log sequence changed, with numbers that JSON cannot express as text."""
        newest = self._report.open_row
        changed = [row for row in self.rows.items if self._changed[row["step"]] > since]
        rows: list[MetricRow] = [*changed, *([] if newest is None else [newest])]
        return [{key: spelled(value) for key, value in row.items()} for row in rows]

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
            "evaluation": self._evaluation,
            "waiting": self._waiting,
            "processes": [msgspec.to_builtins(process) for _, process in sorted(self._processes.items())],
            "engines": [msgspec.to_builtins(engine) for _, engine in sorted(self._engines.items())],
            "lines": list(self._lines),
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
            "books": msgspec.to_builtins(ledger.books()),
            "stages": {name: {"count": counts[name], "groups": stages[name]} for name in stages},
            "dropped": dict(ledger.dropped),
            "failed": dict(ledger.failed),
            "endings": [msgspec.to_builtins(ending) for ending in reversed(self._endings)],
        }

    def times(self, from_step: int = 0) -> dict[str, Any]:
        """The time breakdown of the run, and of its steps from one on."""
        steps = [step for step in self.step_times.items if step.step >= from_step]
        return {
            "parts": dict(PARTS),
            "totals": self.breakdown.totals,
            "num_steps": self.breakdown.num_steps,
            "stopped_s": self.breakdown.stopped_s,
            "steps": [
                {"step": step.step, "begin": step.begin, "parts": step.parts, "worst": step.worst} for step in steps
            ],
        }
