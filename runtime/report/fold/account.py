"""The account of a run's time, from the log alone: spans of groups, steps and processes, and the parts of steps.

All that people see of times is a view of it: the closing line, `perf/*`, bars, the timeline, traces and tables. A step
lasts from the end of the step before it to its own end. The trainer reports how long it waited for the batch, fetched
it, trained and exported weights: this places its work in the step. The wait is explained by groups (wait.py). Updates
of weights, evaluations, checkpoints and restarts explain what groups do not. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    EventLoopBlocked,
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
from runtime.report.fold.spans import Canvas, Life, Span, StepTime, TrainerWork, WeightTimes, work_of
from runtime.report.fold.wait import (
    BEFORE_ALL,
    BEFORE_THE_WAIT,
    BLOCKED,
    IN_THE_WAIT,
    longest_of_training,
    paint_spans,
    paint_wait,
)

KEPT_STEPS: Final = 5_000
KEPT_SPANS: Final = 4_096  # groups that ended outside of a batch, and weight updates and others of the newest step
KEPT_LIVES: Final = 100_000  # groups; the oldest are left out
KEPT_BATCHES: Final = 1_000
KEPT_RESTARTS: Final = 64
KEPT_VERSIONS: Final = 16
RECENT_STEPS: Final = 20
LATE_STEPS: Final = 8  # newest ones, which a late checkpoint may change
MAX_TEXT: Final = 200  # characters of a reason
TRAINER: Final = "trainer"
BUS, BUFFER = "nats-server", "buffer"
PHASES: Final = {  # kinds of the spans of phases in which trainer and engines share memory
    Phase.RELEASE: "memory",
    Phase.OFFLOAD: "memory",
    Phase.RESUME_WEIGHTS: "memory",
    Phase.UPDATE: "phase update",
    Phase.RESUME_KV: "memory",
}
KEEP: Final = Outcome.KEEP  # a name of this module is read ten times quicker than an enum's member
LOST: Final = {Outcome.DROP: "dropped", Outcome.FAILED: "failed"}  # verdicts that end a group

Batch = tuple[float, tuple[int, ...]]  # time and groups


class Account(msgspec.Struct):
    """Folds the events of a run, from the first on, into its spans and the times of its steps."""

    reads_facts: bool = False  # whether the span of a group has the facts of its samples
    steps: list[StepTime] = []  # the newest KEPT_STEPS
    totals: dict[str, float] = {}  # seconds by part, over the whole run
    num_steps: int = 0
    num_timed: int = 0  # steps that were trained once, and their seconds
    timed_s: float = 0.0
    began: float = 0.0  # of the run's first event
    last: float = 0.0  # of the newest event
    stopped_s: float = 0.0  # between starts of the run, which is in no part
    boundary: float = 0.0  # end of the newest step; 0: none
    lives: dict[int, Life] = {}  # of groups that have not ended
    ended: list[Life] = []  # attempts that ended outside of a batch since the newest step
    batches: dict[int, Batch] = {}  # that are not trained, by step
    applied: dict[int, float] = {}  # time at which engines first held a version
    loaded: float = 0.0  # time at which engines first held any since the run was started; 0: they hold none
    spans: list[Span] = []  # of weights, evaluations, checkpoints and faults since the newest step
    evaluation: tuple[int, float] | None = None  # the running one: train steps before it, and when it began
    down: dict[str, float] = {}  # processes that ended and are not back, with the time
    actors: set[str] = set()  # processes that were started once
    unpublished: float = 0.0  # start of a trainer that has neither announced weights nor trained; 0: there is none
    phase: tuple[PhaseChanged, float] | None = None  # the current one with colocation, and when it began
    starting: bool = True  # the run was started, and its trainer is not there yet
    blocked: dict[str, tuple[float, str, EventLoopBlocked]] = {}  # by process: since when, and by what
    restarts: list[tuple[float, str]] = []  # the newest: time and process
    weights: WeightTimes = msgspec.field(default_factory=WeightTimes)
    step: StepTime | None = None  # that the newest event ended

    def apply(self, event: Message, time: float, ended: list[Span] | None = None) -> StepTime | None:
        """Fold the next event; return the step that it ends.

        Args:
            event: the event.
            time: Unix time at which it was logged.
            ended: gets the spans that it ends.
        """
        if not self.began:
            self.began = self.boundary = time
        self.step = None
        match event:
            case GroupCompleted():
                self._complete(event, time, ended)
            case VerdictGiven():
                self._judge(event, time, ended)
            case BatchReady():
                self._batch(event, time, ended)
            case BatchTrained():
                self._train(event, time, ended)
            case _:
                self._rarer(event, time, [] if ended is None else ended)
        self.last = time
        return self.step

    # what views read

    @property
    def is_idle(self) -> bool:
        """Whether the run was started, and does nothing yet."""
        return self.starting and not self.lives and self.evaluation is None

    @property
    def recent_s(self) -> list[float]:
        """Seconds of the newest steps, without starts and restarts."""
        steps = [step for step in self.steps[-RECENT_STEPS:] if step.what == "step"]
        return [step.seconds - step.parts.get("faults", 0.0) - step.parts.get("start", 0.0) for step in steps]

    def so_far(self, now: float) -> dict[str, float]:
        """Return the parts of the running step as of a Unix time. The trainer reports its work only at its end."""
        ready, _ = self.batches.get(self.num_steps, (now, ()))
        ready = max(self.boundary, min(ready, now))
        work = TrainerWork(self.boundary, ready, ready, ready, now)
        lives = [life for life in self.lives.values() if life.issued <= ready]
        canvas, _ = self._painted(now, work, (ready, lives))
        canvas.paint("rollout", min([life.issued for life in lives if not life.is_over], default=ready), ready)
        canvas.rest("wait")
        return dict(canvas.parts)

    # groups

    def _running(self, group_id: int, attempt: int) -> Life | None:
        """Return the attempt at a group, if it is its newest one and still runs."""
        life = self.lives.get(group_id)
        return life if life is not None and life.attempt == attempt and not life.is_over else None

    def _rarer(self, event: Message, time: float, ended: list[Span]) -> None:
        """Fold an event that is not one of the commonest."""
        match event:
            case GroupsIssued():
                self._issue(event, time)
            case GroupAborted():
                if (life := self._running(event.group_id, event.attempt)) is not None:
                    ended.append(life.span("halted", life.issued, time))
                    life.ready = time
                    self._explain(life)
            case GroupFailed():
                if self._running(event.group_id, event.attempt) is not None:
                    self._end([event.group_id], "failed", event.reason, time, ended)
            case GroupsClosed():
                self._end(event.group_ids, event.outcome, event.reason, time, ended)
            case RunFinished():
                self._finish(event, time, ended)
            case _:
                self._span(event, time, ended)

    def _issue(self, event: GroupsIssued, time: float) -> None:
        for group in event.groups:
            before = self.lives.pop(group.group_id, None)
            born = time if before is None else before.born
            self.lives[group.group_id] = Life(group.group_id, group.attempt, born, time, event.min_version)
        while len(self.lives) > KEPT_LIVES:
            del self.lives[next(iter(self.lives))]

    def _complete(self, event: GroupCompleted, time: float, ended: list[Span] | None) -> None:
        life = self.lives.get(event.group_id)
        if life is None or life.attempt != event.attempt or life.completed or life.ready:
            return
        life.complete(event, time)
        if ended is not None:
            life.read_versions(event)
            if self.reads_facts:
                life.read_facts(event)
            ended += life.spans()

    def _judge(self, event: VerdictGiven, time: float, ended: list[Span] | None) -> None:
        life = self.lives.get(event.group_id)
        if life is None or life.attempt != event.attempt or not life.completed or life.ready:
            return
        life.ready = time
        is_lost, reason = event.outcome is not KEEP and event.outcome in LOST, event.reason or ""
        if ended is not None:
            name = f"filter: {reason or event.outcome}" if is_lost else "filter"
            facts = {"outcome": event.outcome.value}
            ended.append(life.span("filter", life.completed, time, name=name, facts=facts))
        if is_lost:
            self._end([event.group_id], LOST[event.outcome], reason, time, ended)

    def _batch(self, event: BatchReady, time: float, ended: list[Span] | None) -> None:
        before = self.batches[event.step][1] if event.index and event.step in self.batches else ()
        self.batches[event.step] = time, (*before, *(ref.group_id for ref in event.groups))
        while len(self.batches) > KEPT_BATCHES:
            del self.batches[next(iter(self.batches))]
        for life in self._lives_of(ref.group_id for ref in event.groups):
            life.ready = life.ready or life.completed or time
            if ended is not None:
                ended.append(life.span("wait for the batch", life.ready, time, step=event.step + 1))

    def _lives_of(self, group_ids: Iterable[int]) -> list[Life]:
        return [life for life in map(self.lives.get, group_ids) if life is not None]

    def _end(self, group_ids: Iterable[int], outcome: str, reason: str, time: float, ended: list[Span] | None) -> None:
        """Note the end of groups outside of a batch. They may explain a later issue."""
        for group_id in group_ids:
            life = self.lives.pop(group_id, None)
            if life is not None:
                if ended is not None:
                    ended.append(_whole(life, outcome, time, reason=reason[:MAX_TEXT]))
                if life.completed or not life.ready:
                    life.ready = life.ready or time
                    self._explain(life)

    def _explain(self, life: Life) -> None:
        self.ended.append(life)
        del self.ended[:-KEPT_SPANS]

    def _settle(self, step: int, time: float, ended: list[Span] | None, *, linked: bool) -> tuple[float, list[Life]]:
        """End the groups of a batch, which is trained."""
        ready, group_ids = self.batches.pop(step)
        lives = self._lives_of(group_ids)
        for life in lives:
            del self.lives[life.group_id]
            if ended is not None:
                ended.append(life.span("wait for the step", ready, time, step=step + 1))
                ended.append(_whole(life, "trained", time, step=step + 1, linked=linked))
        return ready, lives

    # other spans

    def _span(self, event: Message, time: float, ended: list[Span]) -> None:
        match event:
            case WeightsAnnounced() if self.unpublished:
                self._add(Span("first weights", f"v{event.version}", self.unpublished, time))
                self.unpublished = 0.0
            case WeightsApplied():
                self._weights_applied(event, time, ended)
            case WeightSyncEnded():
                self._add(Span("sync", f" v{event.version}", time - event.took_s, time))
                self.weights.sync_s += event.took_s
                self.weights.sent_bytes += event.sent_bytes
            case EvalIssued():
                self.evaluation = event.step, time
            case EvalEnded() if self.evaluation is not None:
                step, begin = self.evaluation
                self.evaluation = None
                ended.append(Span("evaluation", f"step {step}", begin, time, facts={"version": event.version}))
                self._add(ended[-1])
            case PairsEvaluated():
                self._add(Span("evaluation by the trainer", f"step {event.step}", time - event.took_s, time))
            case CheckpointSaved():
                self._checkpoint(event, time, ended)
            case EventLoopBlocked():
                self._blocked(event, time)
            case ActorExited():
                self.down[event.actor] = time
                self.blocked.pop(event.actor, None)
            case ActorStarted():
                self._started(event, time, ended)
            case TrainerStarted():
                self._trainer_started(event, time, ended)
            case PhaseChanged():
                self._phase_changed(event, time, ended)
            case _:
                pass

    def _add(self, span: Span) -> None:
        self.spans.append(span)
        del self.spans[:-KEPT_SPANS]

    def _weights_applied(self, event: WeightsApplied, time: float, ended: list[Span]) -> None:
        versions, name = (event.version, event.version), f"v{event.version}"
        for engine in event.engines:
            facts, begin = {"pause_s": engine.pause_s}, time - engine.took_s
            ended.append(Span("update", name, begin, time, engine.engine, versions=versions, facts=facts))
        slow = max(event.engines, key=lambda engine: engine.took_s, default=None)
        kind = "weights" if self.loaded else "first load"
        self.loaded = self.loaded or time
        self._add(Span(kind, name if slow is None else f"{name} on {slow.engine}", time - event.took_s, time))
        self.weights.apply(event)
        for version in range(max(self.applied, default=event.version - 1) + 1, event.version + 1):
            self.applied[version] = time
        for version in sorted(self.applied)[:-KEPT_VERSIONS]:
            del self.applied[version]

    def _blocked(self, event: EventLoopBlocked, time: float) -> None:
        who = event.function or event.actor
        name = f"{who}: {event.place}" if event.place else who
        if event.ended:
            self.blocked.pop(event.actor, None)
            self._add(Span("blocked", name, time - event.blocked_s, time))
            self.weights.blocked_s += event.blocked_s
        else:
            self.blocked[event.actor] = time - event.blocked_s, name, event

    def _checkpoint(self, event: CheckpointSaved, time: float, ended: list[Span]) -> None:
        """Paint a checkpoint's pause, also in a step that ended before it was reported."""
        begin, facts = time - event.took_s, {"pause_s": event.pause_s}
        ended.append(Span("checkpoint", f"checkpoint of step {event.step}", begin, time, facts=facts))
        self._add(Span("checkpoint", f"step {event.step}", begin, begin + event.pause_s))
        self._add(Span("writing", f"step {event.step}", begin, time))
        for step in self.steps[-LATE_STEPS:]:
            overlap = min(step.gap[1], begin + event.pause_s) - max(step.gap[0], begin)
            moved = min(overlap, step.parts.get("unexplained", 0.0))
            if moved > 0:
                for parts in (step.parts, self.totals):
                    parts["unexplained"] = parts.get("unexplained", 0.0) - moved
                    parts["checkpoint"] = parts.get("checkpoint", 0.0) + moved
                step.worst["checkpoint"] = f"step {event.step}"

    def _started(self, event: ActorStarted, time: float, ended: list[Span]) -> None:
        of_home = BUS if BUS in self.actors else BUFFER  # the daemon of another node may start while the run goes on
        left = self.down.pop(event.actor, None)
        if event.restarts == 0 and event.actor == of_home and event.actor in self.actors:
            self._begin_again(time, ended)
            left = None
        if left is not None:
            ended.append(Span("down", "down", left, time, event.actor, facts={"node": event.node}))
        self.actors.add(event.actor)
        if event.restarts:
            self.restarts.append((time, event.actor))
            del self.restarts[:-KEPT_RESTARTS]
        if left is not None and event.actor != TRAINER:
            self._add(Span("faults", event.actor, left, time))
        elif left is not None:
            self.down[TRAINER] = left  # until it has loaded its checkpoint

    def _begin_again(self, time: float, ended: list[Span]) -> None:
        self.stopped_s += time - self.last
        if self.last > self.boundary:  # what was not finished is done again
            self._close_as(self.last, "lost", "faults", ended)
        self.boundary, self.starting = time, True
        self.unpublished, self.phase, self.loaded = 0.0, None, 0.0
        self.down.clear()
        self.spans.clear()
        self.blocked.clear()
        self.restarts.clear()

    def _close_as(self, end: float, what: str, part: str, ended: list[Span]) -> None:
        """Account for the time since the newest step as one part."""
        ended.append(Span("part", part, self.boundary, end))
        self._close(StepTime(self.num_steps, self.boundary, end, {part: end - self.boundary}, what=what))

    def _trainer_started(self, event: TrainerStarted, time: float, ended: list[Span]) -> None:
        left = self.down.pop(TRAINER, None)
        if self.starting and time > self.boundary:
            self._close_as(time, "start", "start", ended)
        elif left is not None:
            self._add(Span("no trainer", TRAINER, left, time))
        self.starting, self.unpublished = False, time
        for step in [step for step in sorted(self.batches) if step < event.step]:  # in its checkpoint, not in the log
            self._settle(step, time, ended, linked=False)

    def _phase_changed(self, event: PhaseChanged, time: float, ended: list[Span]) -> None:
        if self.phase is not None:
            before, begin = self.phase
            if event.incarnation < before.incarnation:
                return
            facts = {"step": event.step, "reason": event.reason}
            ended.append(Span("phase", before.phase.value, begin, time, facts=facts))
            if before.phase in PHASES:
                named = "" if before.phase is Phase.UPDATE else f"phase {before.phase}"
                self._add(Span(PHASES[before.phase], named, begin, time))
        self.phase = event, time

    # steps

    def _train(self, event: BatchTrained, time: float, ended: list[Span] | None) -> None:
        is_known = event.step in self.batches
        batch = self._settle(event.step, time, ended, linked=True) if is_known else None
        what = "replay" if event.replay or event.step < self.num_steps else "step"
        work = work_of(event.metrics, time)
        begin, began = self.boundary, max(self.boundary, work.begin)
        if event.replay:
            worst = {"faults": f"step {event.step + 1} trained again"}
            canvas = Canvas(begin, time)
            paint_spans(canvas, worst, self._known_spans(), BEFORE_ALL)
            canvas.rest("faults")
        else:
            canvas, worst = self._painted(time, work, batch)
        worst |= longest_of_training(event.metrics)
        canvas.paint("wait", began, work.waited)
        canvas.rest("unexplained")
        step = event.step + 1
        self._close(StepTime(step, begin, time, dict(canvas.parts), worst, what, (begin, began)))
        if ended is not None:
            facts = {"groups": event.num_groups, "samples": event.num_samples, "tokens": event.num_tokens}
            kind = "step" if is_known else "replayed"
            ended.append(Span(kind, f"step {step}", begin, time, step=step, facts=facts))
            ended += canvas.spans(step)

    def _painted(
        self, end: float, work: TrainerWork, batch: tuple[float, Sequence[Life]] | None
    ) -> tuple[Canvas, dict[str, str]]:
        """Paint what is known of the time since the newest step; name the worst by part."""
        begin, began = self.boundary, max(self.boundary, work.begin)
        canvas, worst, spans = Canvas(begin, end), dict[str, str](), self._known_spans()
        paint_spans(canvas, worst, spans, BEFORE_ALL)
        canvas.paint("train", work.training, work.trained)
        canvas.paint("fetch", work.waited, work.fetched)
        paint_spans(canvas, worst, spans, BLOCKED)  # an actor that stands still makes all others wait
        canvas.paint("weights", work.trained, end)
        paint_spans(canvas, worst, spans, {"memory": "memory"}, (work.fetched, work.training))
        if self.phase is not None and self.phase[0].phase is Phase.TRAIN:  # the trainer loads what it had offloaded
            canvas.paint("memory", max(work.fetched, self.phase[1]), work.training)
        paint_spans(canvas, worst, spans, BEFORE_THE_WAIT, (begin, began))
        if batch is not None:
            ready, lives = batch
            others = (*self.ended, *self.lives.values())
            faults = [span for span in self.spans if span.kind == "faults"]
            wait = began, work.waited
            paint_wait(
                canvas, worst, lives, others, ready, wait, applied=self.applied, loaded=self.loaded, faults=faults
            )
        paint_spans(canvas, worst, spans, IN_THE_WAIT, (began, work.waited))
        return canvas, worst

    def _finish(self, event: RunFinished, time: float, ended: list[Span]) -> None:
        """Account for the time after the last step."""
        canvas, worst = Canvas(self.boundary, time), dict[str, str]()
        paint_spans(canvas, worst, self._known_spans(), BLOCKED | IN_THE_WAIT | BEFORE_THE_WAIT)
        canvas.rest("end")
        self._close(StepTime(event.steps, self.boundary, time, dict(canvas.parts), worst, "end"))
        ended += canvas.spans(0)

    def _close(self, done: StepTime) -> None:
        self.step = done
        self.steps.append(done)
        del self.steps[:-KEPT_STEPS]
        self.num_steps = max(self.num_steps, done.step)
        if done.what == "step":
            self.num_timed, self.timed_s = self.num_timed + 1, self.timed_s + done.seconds
        for part, seconds in done.parts.items():
            self.totals[part] = self.totals.get(part, 0.0) + seconds
        self.boundary, self.unpublished, self.starting = done.end, 0.0, False
        self.spans = [span for span in self.spans if span.end > done.end]
        self.ended.clear()

    def _known_spans(self) -> list[Span]:
        """Return the spans since the newest step, the running evaluation, and the calls that block an event loop."""
        running = [] if self.evaluation is None else [Span("evaluation", "running", self.evaluation[1], math.inf)]
        running += [Span("blocked", name, since, math.inf) for since, name, _ in self.blocked.values()]
        return [*self.spans, *running]


def _whole(life: Life, outcome: str, time: float, *, reason: str = "", step: int = 0, linked: bool = False) -> Span:
    """Return the span of a group from its first issue to its end."""
    facts: Mapping[str, object] = {**life.facts, "reason": reason, "linked": linked}
    span = life.span("group", life.born, max(time, life.born), step=step, name=outcome)
    return msgspec.structs.replace(span, facts=dict(facts))
