"""The step timer: durations of the parts of each step, from the times of the log. Pure."""

import math

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    EvalIssued,
    GroupCompleted,
    GroupsIssued,
    Message,
    WeightsAnnounced,
    WeightsApplied,
    WeightSyncEnded,
)
from runtime.report.rows import MetricRow

RECENT = 20  # steps used to estimate the remaining time
PARTS = {"rollout": "perf/rollout_time", "train": "perf/train_time", "weights": "perf/update_weights_time"}


class _Clock(msgspec.Struct):
    """Times of recent events, in Unix time."""

    issued: dict[int, float] = {}  # first issue, by step
    batched: dict[int, float] = {}  # by step
    trained: float | None = None  # end of the newest step
    announced: dict[int, float] = {}  # start of publication, by weight version
    update_s: float | None = None  # duration of the newest weight update, from publication to confirmation
    applied: int = 0  # newest weight version that engines confirmed
    applied_s: float | None = None  # seconds from its announcement to confirmation, at the slowest rollout actor
    pause_s: float | None = None  # longest pause of an engine
    session_s: float = 0.0  # duration of weight syncs since the newest step
    sent_bytes: int = 0  # sent by them to each engine
    eval_began: float | None = None
    eval_s: float = 0.0  # evaluation time since the newest step


class Times(msgspec.Struct):
    """Computes the duration of each step's parts from event times."""

    recent_s: list[float] = []  # step times
    _clock: _Clock = msgspec.field(default_factory=_Clock)
    _spent_s: dict[str, float] = {}  # by part of a step
    _num_steps: int = 0  # number of timed steps
    _open_step: int | None = None  # without a batch so far; None: unknown, but rounds are steps unless halted

    def note(self, event: Message, time: float) -> None:
        """Record the time of an event."""
        clock = self._clock
        match event:
            case GroupCompleted():  # the commonest one
                pass
            case GroupsIssued():
                step = event.round if self._open_step is None else self._open_step
                clock.issued.setdefault(step, time)
            case BatchReady():
                self._open_step = max(self._open_step or 0, event.step + 1)
                clock.batched[event.step] = time
            case WeightsAnnounced():
                clock.announced[event.version] = time - event.took_s
            case WeightsApplied():
                self._note_applied(event, time)
            case WeightSyncEnded():
                clock.session_s += event.took_s
                clock.sent_bytes += event.sent_bytes
            case EvalIssued():
                clock.eval_began = time
            case _:
                pass

    def _note_applied(self, event: WeightsApplied, time: float) -> None:
        clock = self._clock
        if event.version > clock.applied:
            clock.applied, clock.applied_s, clock.pause_s = event.version, None, None
        if event.version == clock.applied:
            clock.applied_s = max(event.took_s, clock.applied_s or 0.0)
            pauses = [engine.pause_s for engine in event.engines]
            clock.pause_s = max((*pauses, clock.pause_s or 0.0)) if pauses else clock.pause_s
        if event.version in clock.announced:
            clock.update_s = time - clock.announced[event.version]
            for version in [version for version in clock.announced if version < event.version]:
                del clock.announced[version]

    def end_evaluation(self, time: float) -> float | None:
        """Record the end of the running evaluation; return its duration. None: its begin is unknown."""
        began, self._clock.eval_began = self._clock.eval_began, None
        if began is None:
            return None
        self._clock.eval_s += time - began
        return time - began

    def interrupt(self) -> None:
        """Discard the running step: its times would include a restart."""
        self._clock = _Clock()

    def metrics(self, event: BatchTrained, time: float) -> MetricRow:
        """Return the durations of a step's parts. They overlap when `max_staleness` lets rollout run ahead."""
        clock, step = self._clock, event.step
        began, batched = clock.issued.pop(step, None), clock.batched.pop(step, time)
        before, clock.trained = clock.trained, time
        eval_s, clock.eval_s = clock.eval_s, 0.0
        since = before if before is not None else began
        step_s = time - since if since is not None else 0.0
        times: MetricRow = {"perf/train_time": event.metrics.get("perf/train_time", time - batched)}
        if began is not None:
            times["perf/rollout_time"] = max(0.0, batched - began)
        if clock.update_s is not None:
            times["perf/update_weights_time"] = clock.update_s
        times |= self._update_metrics()
        if step_s > 0:
            wait_s = max(0.0, step_s - times["perf/train_time"])
            times |= {"perf/step_time": step_s, "perf/train_wait_time": wait_s, "perf/wait_time_ratio": wait_s / step_s}
            times["perf/tokens_per_sec"] = event.num_tokens / step_s
            self._account(times, step_s, eval_s)
        return times

    def _update_metrics(self) -> MetricRow:
        """Return the metrics of the newest confirmed version, and of weight syncs since the last step."""
        clock, row = self._clock, MetricRow()
        if clock.applied_s is not None:
            row["perf/update_weights_applied_time"] = clock.applied_s
        if clock.pause_s is not None:
            row["perf/update_weights_pause_time"] = clock.pause_s
        if clock.session_s:
            row["perf/update_weights_session_time"] = clock.session_s
            row["perf/update_weights_wire_bytes"] = clock.sent_bytes
        clock.session_s, clock.sent_bytes = 0.0, 0
        return row

    def _account(self, times: MetricRow, step_s: float, eval_s: float) -> None:
        self.recent_s = [*self.recent_s, step_s][-RECENT:]
        self._num_steps += 1
        parts = {part: times.get(key, 0.0) for part, key in PARTS.items()} | {"evaluation": eval_s}
        parts["other"] = max(0.0, step_s - math.fsum(parts.values()))
        for part, seconds in {**parts, "step": step_s}.items():
            self._spent_s[part] = self._spent_s.get(part, 0.0) + seconds

    def lines(self) -> list[str]:
        """Format the mean step time and its parts."""
        if not self._num_steps:
            return []
        whole_s = self._spent_s["step"]
        shares = [
            f"{part} {seconds / self._num_steps:.3f} s ({seconds / whole_s:.0%})"
            for part, seconds in self._spent_s.items()
            if part != "step" and seconds > 0
        ]
        overlap = "; parts overlap" if math.fsum(self._spent_s.values()) - whole_s > 1.01 * whole_s else ""
        return [f"time      {whole_s / self._num_steps:.3f} s a step: {', '.join(shares)}{overlap}"]
