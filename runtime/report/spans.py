"""Spans of groups, steps, weight updates, evaluations and restarts, for a trace and the timeline of the page. Pure."""

from typing import Any, Final

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    EvalEnded,
    EvalIssued,
    GroupCompleted,
    Message,
    Outcome,
    PhaseChanged,
    VerdictGiven,
    WeightsApplied,
)
from runtime.report.trainer_work import work_of

KEPT_GROUPS: Final = 100_000  # that wait for a verdict
KEPT_SPANS: Final = 20_000  # of the timeline; the newest ones
SHOWN_STEPS: Final = 5  # if a page does not say how many
MAX_BARS: Final = 3_000  # of a window


class Span(msgspec.Struct, frozen=True):
    """Something that took time. Times are Unix times in seconds."""

    kind: str  # a lane of the timeline, or "step", "phase" or "down"
    row: str  # within its lane: an engine, a process; empty: none
    name: str
    begin: float
    end: float
    group: int | None = None
    facts: dict[str, Any] = {}


class Spans(msgspec.Struct):
    """Folds the events of a run into spans, each when it ends."""

    completed: dict[int, float] = {}  # groups that wait for a verdict
    evaluation: tuple[int, float] | None = None
    down: dict[str, float] = {}

    def apply(self, event: Message, time: float) -> list[Span]:
        """Fold the next event, logged at a Unix time; return the spans that it ends."""
        match event:
            case GroupCompleted():
                return self._complete(event, time)
            case VerdictGiven():
                began = self.completed.pop(event.group_id, None)
                if began is None:
                    return []
                dropped = event.outcome in (Outcome.DROP, Outcome.FAILED)
                name = f"filter: {event.reason or event.outcome}" if dropped else "filter"
                return [Span("filter", "", name, began, time, event.group_id, {"outcome": event.outcome.value})]
            case BatchTrained():
                return _of_step(event, time)
            case PhaseChanged() if event.previous is not None:
                facts = {"step": event.step, "reason": event.reason}
                return [Span("phase", "", event.previous, time - event.took_s, time, facts=facts)]
            case CheckpointSaved():
                facts = {"pause_s": event.pause_s}
                name = f"checkpoint of step {event.step}"
                return [Span("checkpoint", "", name, time - event.took_s, time, facts=facts)]
            case WeightsApplied():
                return [
                    Span(
                        "update",
                        engine.engine,
                        f"v{event.version}",
                        time - engine.took_s,
                        time,
                        facts={"pause_s": engine.pause_s},
                    )
                    for engine in event.engines
                ]
            case EvalIssued():
                self.evaluation = event.step, time
            case EvalEnded() if self.evaluation is not None:
                step, began = self.evaluation
                self.evaluation = None
                return [Span("evaluation", "", f"step {step}", began, time, facts={"version": event.version})]
            case ActorExited():
                self.down[event.actor] = time
            case ActorStarted() if event.actor in self.down:
                return [Span("down", event.actor, "down", self.down.pop(event.actor), time, facts={"node": event.node})]
            case _:
                pass
        return []

    def _complete(self, event: GroupCompleted, time: float) -> list[Span]:
        tokens, last = time - event.reward_time_s, event.last_sample
        self.completed[event.group_id] = time
        while len(self.completed) > KEPT_GROUPS:
            del self.completed[next(iter(self.completed))]
        facts = {"attempt": event.attempt, "engine": last.engine, "queue_s": last.queue_time_s}
        return [
            Span("rollout", "", "rollout", tokens - event.rollout_time_s, tokens, event.group_id, facts),
            Span("scores", "", "scores", tokens, time, event.group_id, {"grader": last.grader}),
        ]


def _of_step(event: BatchTrained, time: float) -> list[Span]:
    """Return a step and its parts."""
    work = work_of(event.metrics, time)
    step = Span("step", "", f"step {event.step + 1}", work.begin, time, facts={"groups": event.num_groups})
    return [step, *(Span(name, "", name, begin, end) for name, begin, end in work.parts)]


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """A span as the page gets it."""

    kind: str
    row: str
    name: str
    begin: float
    end: float
    group: int  # -1: none
    step: int  # whose batch has the group, or that it is part of; 0: none
    versions: tuple[int, int]  # oldest and newest weights of a group, or the version that was brought to an engine


class Window(msgspec.Struct, frozen=True):
    """The bars of some steps."""

    first: int  # steps, from 1; 0: none was trained yet
    last: int
    oldest: int  # step from which on bars are kept
    newest: int
    begin: float  # Unix times
    end: float
    steps: list[tuple[int, float, float]]  # number, begin and end
    bars: list[Bar]
    left_out: int  # shortest bars of groups, beyond MAX_BARS


class Timeline(msgspec.Struct):
    """Keeps the newest spans of a run, and returns those of some steps."""

    spans: Spans = msgspec.field(default_factory=Spans)
    bars: list[Bar] = []
    steps: dict[int, tuple[float, float]] = {}  # begin and end of the kept steps
    groups: dict[int, int] = {}  # kept groups in a batch, with its step from 1
    versions: dict[int, tuple[int, int]] = {}  # of groups that wait for a verdict
    boundary: float = 0.0  # end of the newest step; before one, time of the first event

    def apply(self, event: Message, time: float) -> None:
        """Fold the next event, logged at a Unix time."""
        self.boundary = self.boundary or time
        step, versions = 0, (0, 0)
        match event:
            case GroupCompleted():
                first = [version for s in event.samples if (version := s.first_version) is not None]
                last = [version for s in event.samples if (version := s.last_version) is not None]
                versions = self.versions[event.group_id] = min(first, default=0), max(last, default=0)
                while len(self.versions) > KEPT_GROUPS:
                    del self.versions[next(iter(self.versions))]
            case VerdictGiven():
                versions = self.versions.pop(event.group_id, versions)
            case BatchReady():
                self.groups.update((ref.group_id, event.step + 1) for ref in event.groups)
            case BatchTrained():
                step = event.step + 1
                before = self.boundary if self.steps else min((bar.begin for bar in self.bars), default=self.boundary)
                self.steps[step] = min(before, time), time
                self.boundary = time
            case WeightsApplied():
                versions = event.version, event.version
            case _:
                pass
        for span in self.spans.apply(event, time):
            if span.kind not in ("step", "phase"):
                group = -1 if span.group is None else span.group
                row = span.row or str(span.facts.get("engine") or span.facts.get("grader") or "")
                self.bars.append(
                    Bar(span.kind, row, span.name, span.begin, max(span.begin, span.end), group, step, versions)
                )
        if len(self.bars) >= 2 * KEPT_SPANS:
            self._forget()

    def _forget(self) -> None:
        self.bars = self.bars[-KEPT_SPANS:]
        known = {bar.group for bar in self.bars}
        self.groups = {group: step for group, step in self.groups.items() if group in known}
        oldest = min(bar.end for bar in self.bars)
        self.steps = {step: span for step, span in self.steps.items() if span[1] > oldest}

    def window(self, last: int = 0, num_steps: int = SHOWN_STEPS) -> Window:
        """Return the bars of some steps.

        Args:
            last: step, from 1; 0: the newest one, and what goes on after it.
            num_steps: number of steps up to that one.
        """
        if not self.steps:
            return Window(0, 0, 0, 0, 0.0, 0.0, [], [], 0)
        oldest, newest = min(self.steps), max(self.steps)
        to = newest if last <= 0 else min(max(last, oldest), newest)
        since = max(oldest, to - max(1, num_steps) + 1)
        kept = [(step, *span) for step, span in self.steps.items() if since <= step <= to]
        begin, end = min(span[1] for span in kept), max(span[2] for span in kept)
        if last <= 0:
            end = max([end, *(bar.end for bar in self.bars[-MAX_BARS:])])
        found = [bar for bar in self.bars if bar.end >= begin and bar.begin <= end]
        left_out = max(0, len(found) - MAX_BARS)
        if left_out:
            found.sort(key=lambda bar: (bar.group < 0, bar.end - bar.begin))
            found = found[left_out:]
        bars = [
            msgspec.structs.replace(bar, step=self.groups[bar.group]) if bar.group in self.groups else bar
            for bar in found
        ]
        return Window(since, to, oldest, newest, begin, end, kept, bars, left_out)
