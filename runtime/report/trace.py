"""Spans of groups, steps, weight updates, evaluations and restarts, in the JSON format of Perfetto. Pure."""

from collections import deque
from typing import Any, Final

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
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
from runtime.report.breakdown import wait_of

MAX_SPANS: Final = 500_000  # the newest ones; about 100 MB
TRAINER, GROUPS, ENGINES, EVALUATION, PROCESSES = range(1, 6)  # lanes, which the format calls processes
LANES: Final = {
    TRAINER: "trainer",
    GROUPS: "groups",
    ENGINES: "weight updates",
    EVALUATION: "evaluation",
    PROCESSES: "processes that are down",
}


class Trace:
    """Folds the events of a run into spans. Times are microseconds since the first event."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.num_left_out = 0
        self._began: float | None = None
        self._completed: dict[int, float] = {}  # groups that wait for a verdict
        self._evaluation: tuple[int, float] | None = None
        self._down: dict[str, float] = {}
        self._rows: dict[tuple[int, str], int] = {}  # of a lane, by name

    def apply(self, event: Message, time: float) -> None:
        """Fold the next event, logged at a Unix time."""
        self._began = time if self._began is None else self._began
        match event:
            case GroupCompleted():
                tokens = time - event.reward_time_s
                last = event.last_sample
                facts = {"attempt": event.attempt, "engine": last.engine, "queue_s": last.queue_time_s}
                self._group(event.group_id, "rollout", tokens - event.rollout_time_s, tokens, facts)
                self._group(event.group_id, "scores", tokens, time, {"grader": last.grader})
                self._completed[event.group_id] = time
                while len(self._completed) > MAX_SPANS:
                    del self._completed[next(iter(self._completed))]
            case VerdictGiven():
                began = self._completed.pop(event.group_id, None)
                if began is not None:
                    dropped = event.outcome in (Outcome.DROP, Outcome.FAILED)
                    name = f"filter: {event.reason or event.outcome}" if dropped else "filter"
                    self._group(event.group_id, name, began, time, {"outcome": event.outcome})
            case BatchTrained():
                self._step(event, time)
            case PhaseChanged() if event.previous is not None:
                facts = {"step": event.step, "reason": event.reason}
                self._add(TRAINER, "phases", event.previous, time - event.took_s, time, facts)
            case CheckpointSaved():
                begin = time - event.took_s
                self._add(
                    TRAINER, "checkpoint", f"checkpoint of step {event.step}", begin, time, {"pause_s": event.pause_s}
                )
            case WeightsApplied():
                for engine in event.engines:
                    facts = {"pause_s": engine.pause_s}
                    self._add(ENGINES, engine.engine, f"v{event.version}", time - engine.took_s, time, facts)
            case EvalIssued():
                self._evaluation = event.step, time
            case EvalEnded() if self._evaluation is not None:
                step, began = self._evaluation
                self._evaluation = None
                self._add(EVALUATION, "evaluation", f"step {step}", began, time, {"version": event.version})
            case ActorExited():
                self._down[event.actor] = time
            case ActorStarted() if event.actor in self._down:
                self._add(PROCESSES, event.actor, "down", self._down.pop(event.actor), time, {"node": event.node})
            case _:
                pass

    def encoded(self) -> bytes:
        """The trace as a file."""
        lanes = [_name("process_name", lane, 0, name) for lane, name in LANES.items()]
        rows = [_name("thread_name", lane, row, name) for (lane, name), row in self._rows.items()]
        return msgspec.json.encode({"traceEvents": [*lanes, *rows, *self.events], "displayTimeUnit": "ms"})

    def _step(self, event: BatchTrained, time: float) -> None:
        """Add the parts of a step: wait and fetch at its begin, training and weights at its end."""
        metrics = event.metrics
        waited, fetched = wait_of(metrics, time)
        begin = waited - metrics.get("perf/train_wait_time", 0.0)
        trained = time - metrics.get("perf/update_weights_time", 0.0)
        training = trained - metrics.get("perf/train_time", 0.0)
        self._add(TRAINER, "steps", f"step {event.step + 1}", begin, time, {"groups": event.num_groups})
        self._add(TRAINER, "work", "wait", begin, waited, {})
        self._add(TRAINER, "work", "fetch", waited, fetched, {})
        self._add(TRAINER, "work", "train", training, trained, {})
        self._add(TRAINER, "work", "weights", trained, time, {})

    def _group(self, group_id: int, name: str, begin: float, end: float, facts: dict[str, Any]) -> None:
        """Add a span of a group. Groups overlap, so each has a row of its own, by its number."""
        start = self._micros(begin)
        common = {"cat": "group", "id": group_id, "pid": GROUPS, "tid": 0, "name": name}
        self._put({**common, "ph": "b", "ts": start, "args": {"group": group_id, **facts}})
        self._put({**common, "ph": "e", "ts": max(start, self._micros(end))})

    def _add(self, lane: int, row: str, name: str, begin: float, end: float, facts: dict[str, Any]) -> None:
        number = self._rows.setdefault((lane, row), 1 + len(self._rows))
        start = self._micros(begin)
        span = {"ph": "X", "cat": LANES[lane], "pid": lane, "tid": number, "name": name}
        self._put({**span, "ts": start, "dur": max(0, self._micros(end) - start), "args": facts})

    def _put(self, event: dict[str, Any]) -> None:
        self.num_left_out += len(self.events) == MAX_SPANS
        self.events.append(event)

    def _micros(self, time: float) -> int:
        return max(0, round((time - (self._began or 0.0)) * 1e6))


def _name(kind: str, lane: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": lane, "tid": row, "args": {"name": name}}
