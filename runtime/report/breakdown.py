"""Where the time of a run went: each step's wall time, split into parts, from the log alone. Pure.

A step lasts from the end of the step before it to its own end. The trainer reports how long it waited for the batch,
fetched it, trained and exported weights: this places its work in the step. The wait is explained by groups
(step_time.py). Updates of weights, evaluations, checkpoints and restarts explain what groups do not.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    EvalEnded,
    EvalIssued,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    PairsEvaluated,
    Phase,
    PhaseChanged,
    RunFinished,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
    WeightSyncEnded,
)
from runtime.report.step_time import (
    BEFORE_ALL,
    BEFORE_THE_WAIT,
    IN_THE_WAIT,
    Canvas,
    Life,
    Named,
    StepTime,
    longest_of_training,
    paint_spans,
    paint_wait,
)
from runtime.report.trainer_work import work_of
from runtime.util.formatting import count_of, duration

KEPT_STEPS: Final = 5_000
KEPT_GROUPS: Final = 4_096  # that ended outside of a batch, and weight updates and others of the newest step
TRAINER: Final = "trainer"
BUS, BUFFER = "nats-server", "buffer"
PHASES: Final = {  # kinds of the spans of phases in which trainer and engines share memory
    Phase.RELEASE: "memory",
    Phase.OFFLOAD: "memory",
    Phase.RESUME_WEIGHTS: "memory",
    Phase.UPDATE: "update",
    Phase.RESUME_KV: "memory",
}


class Breakdown(msgspec.Struct):
    """Folds the events of a run, from the first on, into the times of its steps."""

    steps: list[StepTime] = []  # the newest KEPT_STEPS
    totals: dict[str, float] = {}  # seconds by part, over the whole run
    num_steps: int = 0
    began: float = 0.0  # of the run's first event
    last: float = 0.0  # of the newest event
    stopped_s: float = 0.0  # between starts of the run, which is in no part
    boundary: float = 0.0  # end of the newest step; 0: none
    lives: dict[int, Life] = {}  # of groups without a trained batch
    ended: list[Life] = []  # of groups that ended outside of a batch since the newest step
    batches: dict[int, tuple[float, tuple[int, ...]]] = {}  # time and groups, by step
    applied: dict[int, float] = {}  # time at which engines first held a version
    spans: list[Named] = []  # of weights, evaluations, checkpoints and faults since the newest step
    evaluation: tuple[float, str] | None = None  # the running one
    down: dict[str, float] = {}  # processes that ended and are not back, with the time
    actors: set[str] = set()  # processes that were started once
    unpublished: float = 0.0  # start of a trainer that has neither announced weights nor trained; 0: there is none
    phase: tuple[PhaseChanged, float] | None = None  # the current one with colocation, and when it began
    starting: float = 0.0  # time of a start of the run whose trainer is not there yet; 0: there is none

    def apply(self, event: Message, time: float) -> StepTime | None:
        """Fold the next event, logged at a Unix time; return the step that it ends."""
        if not self.began:
            self.began = self.boundary = self.starting = time
        match event:
            case GroupsIssued():
                for group in event.groups:
                    self.lives[group.group_id] = Life(group.group_id, time, event.min_version)
            case GroupCompleted():
                self._complete(event, time)
            case VerdictGiven():
                self._ready(event.group_id, time)
                if event.outcome in (Outcome.DROP, Outcome.FAILED):
                    self._end([event.group_id], time)
            case GroupAborted() | GroupFailed():
                self._end([event.group_id], time)
            case GroupsClosed():
                self._end(event.group_ids, time)
            case BatchReady():
                before = self.batches[event.step][1] if event.index and event.step in self.batches else ()
                self.batches[event.step] = time, (*before, *(ref.group_id for ref in event.groups))
            case BatchTrained():
                self.last = time
                return self._train(event, time)
            case RunFinished():
                self.last = time
                return self._finish(event, time)
            case _:
                self._span(event, time)
        self.last = time
        return None

    def lines(self) -> list[str]:
        """Format the times of the run, one part a line, longest first, with what was worst in its worst step."""
        whole = math.fsum(self.totals.values())
        if whole <= 0:
            return ["no step has ended yet"]
        mean = f", {duration(whole / self.num_steps)} a step" if self.num_steps else ""
        lines = [f"{duration(whole)} in {count_of(self.num_steps, 'step')}{mean}"]
        for part, seconds in sorted(self.totals.items(), key=lambda item: -item[1]):
            worst = max(self.steps, key=lambda step: step.parts.get(part, 0.0), default=None)
            most = worst.parts.get(part, 0.0) if worst is not None else 0.0
            name = worst.worst.get(part, "") if worst is not None else ""
            where = f"  most in step {worst.step}: {most:.3f} s{f', {name}' if name else ''}" if worst and most else ""
            lines.append(f"{part:<12} {seconds:>10.3f} s {seconds / whole:>6.1%}{where}")
        if self.totals.get("queue") == max(self.totals.values()):
            lines.append("queue is the longest: all slots of the engines are taken, so the engines are the limit")
        if self.stopped_s:
            lines.append(f"the run was stopped for {duration(self.stopped_s)}, which is not counted")
        return lines

    # groups

    def _complete(self, event: GroupCompleted, time: float) -> None:
        life = self.lives.get(event.group_id)
        if life is None or life.completed:
            return
        life.completed = time
        life.rollout_s, life.reward_s = event.rollout_time_s, event.reward_time_s
        last = event.last_sample
        life.last_token = time - life.reward_s
        life.begun = max(life.issued, life.last_token - life.rollout_s + min(last.queue_time_s, life.rollout_s))
        life.engine, life.grader = last.engine or event.instance, last.grader

    def _ready(self, group_id: int, time: float) -> None:
        life = self.lives.get(group_id)
        if life is not None and not life.ready:
            life.ready = time

    def _end(self, group_ids: Iterable[int], time: float) -> None:
        """Move groups that leave the run, or begin anew, to those that may explain a later issue."""
        for group_id in group_ids:
            life = self.lives.pop(group_id, None)
            if life is not None:
                life.ready = life.ready or time
                self.ended.append(life)
        del self.ended[:-KEPT_GROUPS]

    # other spans

    def _span(self, event: Message, time: float) -> None:
        match event:
            case WeightsAnnounced() if self.unpublished:
                self._add(Named("first weights", self.unpublished, time, f"v{event.version}"))
                self.unpublished = 0.0
            case WeightsApplied():
                slow = max(event.engines, key=lambda engine: engine.took_s, default=None)
                name = f"v{event.version}" if slow is None else f"v{event.version} on {slow.engine}"
                self._add(Named("weights", time - event.took_s, time, name))
                for version in range(max(self.applied, default=event.version - 1) + 1, event.version + 1):
                    self.applied[version] = time
                for version in sorted(self.applied)[:-16]:
                    del self.applied[version]
            case WeightSyncEnded():
                self._add(Named("sync", time - event.took_s, time, f" v{event.version}"))
            case EvalIssued():
                self.evaluation = time, f"step {event.step}"
            case EvalEnded() if self.evaluation is not None:
                begin, name = self.evaluation
                self.evaluation = None
                self._add(Named("evaluation", begin, time, name))
            case PairsEvaluated():
                self._add(Named("evaluation by the trainer", time - event.took_s, time, f"step {event.step}"))
            case CheckpointSaved():
                self._checkpoint(event, time)
            case ActorExited():
                self.down[event.actor] = time
            case ActorStarted():
                self._started(event, time)
            case TrainerStarted():
                self._trainer_started(time)
            case PhaseChanged():
                self._phase_changed(event, time)
            case _:
                pass

    def _add(self, span: Named) -> None:
        self.spans.append(span)
        del self.spans[:-KEPT_GROUPS]

    def _checkpoint(self, event: CheckpointSaved, time: float) -> None:
        """Paint a checkpoint's pause, also in a step that ended before it was reported."""
        begin = time - event.took_s
        self._add(Named("checkpoint", begin, begin + event.pause_s, f"step {event.step}"))
        self._add(Named("writing", begin, time, f"step {event.step}"))
        for step in self.steps[-8:]:
            overlap = min(step.gap[1], begin + event.pause_s) - max(step.gap[0], begin)
            moved = min(overlap, step.parts.get("unexplained", 0.0))
            if moved > 0:
                for parts in (step.parts, self.totals):
                    parts["unexplained"] = parts.get("unexplained", 0.0) - moved
                    parts["checkpoint"] = parts.get("checkpoint", 0.0) + moved
                step.worst["checkpoint"] = f"step {event.step}"

    def _started(self, event: ActorStarted, time: float) -> None:
        of_home = BUS if BUS in self.actors else BUFFER  # the daemon of another node may start while the run goes on
        if event.restarts == 0 and event.actor == of_home and event.actor in self.actors:
            self._begin_again(time)
        self.actors.add(event.actor)
        left = self.down.pop(event.actor, None)
        if left is not None and event.actor != TRAINER:
            self._add(Named("faults", left, time, event.actor))
        elif left is not None:
            self.down[TRAINER] = left  # until it has loaded its checkpoint

    def _begin_again(self, time: float) -> None:
        self.stopped_s += time - self.last
        self._count({"faults": self.last - self.boundary})  # what was not finished is done again
        self.boundary = self.starting = time
        self.unpublished, self.phase = 0.0, None
        self.down.clear()
        self.spans.clear()

    def _trainer_started(self, time: float) -> None:
        self.unpublished = time
        left = self.down.pop(TRAINER, None)
        if self.starting:
            self._add(Named("start", self.starting, time, TRAINER))
            self.starting = 0.0
        elif left is not None:
            self._add(Named("no trainer", left, time, TRAINER))

    def _phase_changed(self, event: PhaseChanged, time: float) -> None:
        if self.phase is not None:
            before, begin = self.phase
            if event.incarnation < before.incarnation:
                return
            if before.phase in PHASES:
                named = "" if before.phase is Phase.UPDATE else f"phase {before.phase}"
                self._add(Named(PHASES[before.phase], begin, time, named))
        self.phase = event, time

    # steps

    def _train(self, event: BatchTrained, time: float) -> StepTime:
        begin, work = self.boundary, work_of(event.metrics, time)
        began = max(begin, work.begin)
        canvas, spans = Canvas(begin, time), self._known_spans()
        worst: dict[str, str] = {}
        paint_spans(canvas, worst, spans, BEFORE_ALL)
        if event.replay:
            canvas.rest("faults")
            worst["faults"] = f"step {event.step + 1} trained again"
        canvas.paint("weights", work.trained, time)
        canvas.paint("train", work.training, work.trained)
        canvas.paint("fetch", work.waited, work.fetched)
        paint_spans(canvas, worst, spans, {"memory": "memory"}, (work.fetched, work.training))
        if self.phase is not None and self.phase[0].phase is Phase.TRAIN:  # the trainer loads what it had offloaded
            canvas.paint("memory", max(work.fetched, self.phase[1]), work.training)
        worst |= longest_of_training(event.metrics)
        paint_spans(canvas, worst, spans, BEFORE_THE_WAIT, (begin, began))
        if (batch := self._batch(event.step)) is not None:
            ready, lives = batch
            others = (*self.ended, *self.lives.values())
            faults = [span for span in self.spans if span.kind == "faults"]
            wait = began, work.waited
            paint_wait(canvas, worst, lives, others, ready, wait, applied=self.applied, faults=faults)
        paint_spans(canvas, worst, spans, IN_THE_WAIT, (began, work.waited))
        canvas.paint("wait", began, work.waited)
        canvas.rest("unexplained")
        done = StepTime(event.step + 1, begin, time, dict(canvas.parts), worst, gap=(begin, began))
        self._close(done)
        return done

    def _close(self, done: StepTime) -> None:
        self.steps.append(done)
        del self.steps[:-KEPT_STEPS]
        self.num_steps = max(self.num_steps, done.step)
        self._count(done.parts)
        self.boundary, self.unpublished = done.end, 0.0
        self.spans = [span for span in self.spans if span.end > done.end]
        self.ended.clear()

    def _count(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self.totals[part] = self.totals.get(part, 0.0) + seconds

    def _finish(self, event: RunFinished, time: float) -> StepTime:
        """Account for the time after the last step."""
        canvas, worst = Canvas(self.boundary, time), dict[str, str]()
        paint_spans(canvas, worst, self._known_spans(), IN_THE_WAIT | BEFORE_THE_WAIT)
        canvas.rest("end")
        done = StepTime(event.steps, self.boundary, time, dict(canvas.parts), worst)
        self._close(done)
        return done

    def _known_spans(self) -> list[Named]:
        """Return the spans since the newest step, and the running evaluation."""
        running = [] if self.evaluation is None else [Named("evaluation", self.evaluation[0], math.inf, "running")]
        return [*self.spans, *running]

    def _batch(self, step: int) -> tuple[float, list[Life]] | None:
        """Take the groups of a batch."""
        found = self.batches.pop(step, None)
        if found is None:
            return None
        lives = [life for life in (self.lives.pop(group_id, None) for group_id in found[1]) if life is not None]
        for life in lives:
            life.ready = life.ready or life.completed or found[0]
        return found[0], lives
