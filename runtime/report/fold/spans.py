"""What took how long: spans, lives of attempts at groups, and the wall time of train steps, part by part. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from messages import GroupCompleted, WeightsApplied
from runtime.report.group_numbers import mean_of

PARTS: Final = {  # of a step, in the order in which they are shown
    "start": "processes start, models and data are loaded, engines get their first weights",
    "rollout": "samples are generated, until four of five groups of the batch have their last token",
    "long tail": "the last fifth of the groups is generated",
    "queue": "all slots of the engines are taken, so groups wait for one; or the rollout actor has not taken them",
    "scores": "samples are graded",
    "filter": "groups wait for a verdict",
    "wait": "the trainer waits for its batch for another reason, such as the buffer",
    "fetch": "the trainer fetches the batch",
    "train": "the trainer trains",
    "weights": "weights are exported and brought to the engines",
    "blocked": "a call blocks the event loop of an actor, such as one of your generate function",
    "memory": "trainer and engines hand over the memory that they share",
    "evaluation": "the weights are evaluated",
    "checkpoint": "training stands still for a checkpoint",
    "faults": "a process is restarted, or steps are trained again",
    "end": "after the last step: its checkpoint and its export",
    "unexplained": "the log does not say",
}
NOTHING: Final[Mapping[str, Any]] = {}


class Span(msgspec.Struct, frozen=True):
    """Something that took time. Times are Unix times in seconds."""

    kind: str  # what a group does or waits for, "group", "step", "part" of a step, "phase", "update", "down" and others
    name: str
    begin: float
    end: float
    row: str = ""  # an engine, a grader, a process; empty: none
    group: int = -1  # -1: none
    attempt: int = 0  # at the group
    step: int = 0  # whose batch has the group, or that it is part of, from 1; 0: none
    versions: tuple[int, int] = (0, 0)  # oldest and newest weights of a group, or those brought to an engine
    facts: Mapping[str, Any] = NOTHING


class Life(msgspec.Struct):
    """An attempt at a group. Times are Unix times in seconds; 0: not yet.

    From its issue to `begun` it is in the queue, then it is rollout up to `last_token`, then scores.
    """

    group_id: int
    attempt: int
    born: float  # first issue of the group
    issued: float  # of this attempt
    min_version: int
    begun: float = 0.0  # when its last sample had a slot
    last_token: float = 0.0
    completed: float = 0.0
    ready: float = 0.0  # verdict, or end without one
    engine: str = ""
    grader: str = ""
    versions: tuple[int, int] = (0, 0)
    facts: Mapping[str, Any] = NOTHING  # of its samples

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended."""
        return bool(self.completed or self.ready)

    def complete(self, event: GroupCompleted, time: float) -> None:
        """Note when its samples were generated and graded, from the end of the attempt backwards."""
        last, rollout_s = event.last_sample, event.rollout_time_s
        self.completed = time
        self.last_token = max(self.issued, time - event.reward_time_s)  # clocks of two processes
        begun = self.last_token - rollout_s + min(last.queue_time_s, rollout_s)
        self.begun = min(self.last_token, max(self.issued, begun))
        self.engine, self.grader = last.engine or event.instance, last.grader

    def read_versions(self, event: GroupCompleted) -> None:
        """Note the oldest and newest weights of its samples, for spans."""
        first = [version for sample in event.samples if (version := sample.first_version) is not None]
        last = [version for sample in event.samples if (version := sample.last_version) is not None]
        self.versions = min(first, default=0), max(last, default=0)

    def read_facts(self, event: GroupCompleted) -> None:
        """Note the facts of its samples, for traces."""
        samples = event.samples
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        about = {"reward": mean_of(rewards) or 0.0} if rewards else {}
        tokens = sum([sample.response_len for sample in samples])
        self.facts = {"samples": len(samples), "response_tokens": tokens, **about}

    def span(
        self,
        kind: str,
        begin: float,
        end: float,
        *,
        step: int = 0,
        row: str = "",
        name: str = "",
        facts: Mapping[str, Any] = NOTHING,
    ) -> Span:
        """Return a span of it."""
        return Span(kind, name or kind, begin, end, row, self.group_id, self.attempt, step, self.versions, facts)

    def spans(self) -> tuple[Span, Span, Span]:
        """Return the spans of a completed attempt."""
        return (
            self.span("queue", self.issued, self.begun),
            self.span("rollout", self.begun, self.last_token, row=self.engine),
            self.span("scores", self.last_token, self.completed, row=self.grader),
        )


class WeightTimes(msgspec.Struct):
    """Times of weight updates, for metrics of a step."""

    applied: int = 0  # newest weight version that engines confirmed
    applied_s: float | None = None  # seconds from its announcement to confirmation, at the slowest rollout actor
    pause_s: float | None = None  # longest pause of an engine
    sync_s: float = 0.0  # duration of weight syncs since the newest step
    sent_bytes: int = 0  # sent by them to each engine
    blocked_s: float = 0.0  # of event loops, since the newest step
    num_moved_on: int = 0  # requests that had to take a newer LoRA adapter, since the newest step

    def apply(self, event: WeightsApplied) -> None:
        """Note that engines of a rollout actor hold a version."""
        self.num_moved_on += sum(engine.num_moved_on for engine in event.engines)
        if event.version > self.applied:
            self.applied, self.applied_s, self.pause_s = event.version, None, None
        if event.version == self.applied:
            self.applied_s = max(event.took_s, self.applied_s or 0.0)
            pauses = [engine.pause_s for engine in event.engines]
            self.pause_s = max((*pauses, self.pause_s or 0.0)) if pauses else self.pause_s

    def row(self) -> dict[str, float]:
        """Return the metrics of the newest confirmed version, and of what happened since the last step."""
        row: dict[str, float] = {}
        if self.applied_s is not None:
            row["perf/update_weights_applied_time"] = self.applied_s
        if self.pause_s is not None:
            row["perf/update_weights_pause_time"] = self.pause_s
        if self.sync_s:
            row["perf/update_weights_session_time"] = self.sync_s
            row["perf/update_weights_wire_bytes"] = self.sent_bytes
        if self.blocked_s:
            row["perf/event_loop_blocked_time"] = self.blocked_s
        if self.num_moved_on:
            row["perf/adapter_requests_moved_on"] = self.num_moved_on
        self.sync_s, self.sent_bytes, self.blocked_s, self.num_moved_on = 0.0, 0, 0.0, 0
        return row


class StepTime(msgspec.Struct):
    """The wall time of one train step, or of what was between steps: a start of the run, its end, lost work."""

    step: int  # steps done with it, from 1; others: steps done before
    begin: float
    end: float
    parts: dict[str, float]  # seconds; they add up to the step
    worst: dict[str, str] = {}  # by part: its worst group, engine, grader or process
    what: str = "step"  # or "start", "replay", "lost", "end"
    gap: tuple[float, float] = (0.0, 0.0)  # before the wait, where a checkpoint may be reported later

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def label(self) -> str:
        """What a line calls it."""
        return f"step {self.step}" if self.what == "step" else self.what


class Canvas:
    """A span of time of which each moment is given to one part, the first that claims it."""

    def __init__(self, begin: float, end: float) -> None:
        self.parts: Counter[str] = Counter()
        self.painted: list[tuple[float, float, str]] = []
        self._free: list[tuple[float, float]] = [(begin, end)] if end > begin else []

    def paint(self, part: str, begin: float, end: float) -> float:
        """Give a part what is free of a span; return the seconds."""
        free: list[tuple[float, float]] = []
        painted = 0.0
        for a, b in self._free:
            left, right = max(a, begin), min(b, end)
            if left >= right:
                free.append((a, b))
                continue
            painted += right - left
            self.painted.append((left, right, part))
            free += [(x, y) for x, y in ((a, left), (right, b)) if y > x]
        self._free = free
        if painted:
            self.parts[part] += painted  # pyright: ignore[reportArgumentType] - it adds any numbers
        return painted

    def rest(self, part: str) -> None:
        """Give a part all that is free."""
        for begin, end in tuple(self._free):
            self.paint(part, begin, end)

    def spans(self, step: int) -> list[Span]:
        """Return what was painted, in the order of time, as parts of a step."""
        spans: list[Span] = []
        for begin, end, part in sorted(self.painted):
            last = spans[-1] if spans else None
            if last is not None and (last.end, last.name) == (begin, part):
                spans[-1] = Span("part", part, last.begin, end, step=step)
            else:
                spans.append(Span("part", part, begin, end, step=step))
        return spans


class TrainerWork(NamedTuple):
    """The trainer's work in a step, as Unix times: wait and fetch at its begin, training and weights at its end.

    With colocation memory is handed over between `fetched` and `training`.
    """

    begin: float  # of the wait for the batch
    waited: float
    fetched: float
    training: float  # begin of training
    trained: float


def work_of(metrics: Mapping[str, float], end: float) -> TrainerWork:
    """Place the durations that the trainer reported in a step that ended at a time."""
    wait_s, fetch_s = metrics.get("perf/train_wait_time", 0.0), metrics.get("perf/fetch_time", 0.0)
    train_s, weights_s = metrics.get("perf/train_time", 0.0), metrics.get("perf/update_weights_time", 0.0)
    known_s = wait_s + fetch_s + train_s + weights_s
    waited = end - max(known_s, metrics.get("perf/step_time", 0.0)) + wait_s
    trained = end - weights_s
    return TrainerWork(waited - wait_s, waited, waited + fetch_s, trained - train_s, trained)
