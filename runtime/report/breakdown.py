"""Where the time of a run went: each step's wall time, split into parts, from the log alone. Pure.

A step lasts from the end of the step before it to its own end. The trainer reports how long it waited for the batch,
fetched it, trained and exported weights: this places its work in the step. The wait is explained backwards from the
batch: by the group that was ready last, its verdict, its scores, its tokens and its queue, then by the group whose end
led to the issue of that one, and so on. Updates of weights, evaluations, checkpoints and restarts explain what groups
do not. Each second has one part, so that the parts of a step add up to it.
"""

import math
from collections import Counter
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
from runtime.report.trainer_work import work_of
from runtime.util.formatting import count_of, duration

PARTS: Final = {  # in the order in which they are shown
    "start": "processes start, models and data are loaded",
    "rollout": "samples are generated, until four of five groups of the batch have their last token",
    "long tail": "the last fifth of the groups is generated",
    "queue": "all slots of the engines are taken, so groups wait for one; or the rollout actor has not taken them",
    "scores": "samples are graded",
    "filter": "groups wait for a verdict",
    "wait": "the trainer waits for its batch for another reason, such as the buffer",
    "fetch": "the trainer fetches the batch",
    "train": "the trainer trains",
    "weights": "weights are exported and brought to the engines",
    "memory": "trainer and engines hand over the memory that they share",
    "evaluation": "the weights are evaluated",
    "checkpoint": "training stands still for a checkpoint",
    "faults": "a process is restarted, or steps are trained again",
    "end": "after the last step: its checkpoint and its export",
    "unexplained": "the log does not say",
}
TAIL: Final = 0.8  # share of a batch's groups that have their last token when the long tail begins
MAX_LINKS: Final = 256  # groups in the chain that explains one wait
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
BEFORE_ALL: Final = {
    "start": "start",
    "no trainer": "faults",
    "first weights": "weights",
}  # parts of spans by their kind, in order of precedence
BEFORE_THE_WAIT: Final = {
    "evaluation by the trainer": "evaluation",
    "checkpoint": "checkpoint",
    "sync": "weights",
    "update": "weights",
    "memory": "memory",
    "writing": "checkpoint",
    "weights": "weights",
}
IN_THE_WAIT: Final = {
    "faults": "faults",
    "evaluation": "evaluation",
    "sync": "weights",
    "weights": "weights",
    "update": "weights",
    "memory": "memory",
    "checkpoint": "checkpoint",
}
TRAINING: Final = (
    "log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "critic_train",
    "forward_backward",
    "optimizer",
    "plan",
)


class Life(msgspec.Struct):
    """Times of one group, in Unix time and seconds."""

    group_id: int
    issued: float
    min_version: int
    completed: float = 0.0  # 0: not yet
    ready: float = 0.0  # verdict, or end without one
    begun: float = 0.0  # when its last sample had a slot
    last_token: float = 0.0
    rollout_s: float = 0.0
    reward_s: float = 0.0
    engine: str = ""
    grader: str = ""


class Named(msgspec.Struct):
    """A span of time, and what it was about."""

    kind: str
    begin: float
    end: float
    name: str = ""


class StepTime(msgspec.Struct):
    """The wall time of one train step."""

    step: int  # steps done with it, from 1; the end of a run has the number of its last step
    begin: float
    end: float
    parts: dict[str, float]  # seconds; they add up to the step
    worst: dict[str, str]  # by part: its worst group, engine, grader or process
    gap: tuple[float, float] = (0.0, 0.0)  # before the wait, where a checkpoint may be reported later


class Canvas:
    """A span of time of which each moment is given to one part, the first that claims it."""

    def __init__(self, begin: float, end: float) -> None:
        self.parts: Counter[str] = Counter()
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
            free += [(x, y) for x, y in ((a, left), (right, b)) if y > x]
        self._free = free
        if painted:
            self.parts[part] += painted  # pyright: ignore[reportArgumentType] - it adds any numbers
        return painted

    def rest(self, part: str) -> None:
        """Give a part all that is free."""
        for begin, end in tuple(self._free):
            self.paint(part, begin, end)


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
        canvas = Canvas(begin, time)
        worst: dict[str, str] = {}
        self._named(canvas, worst, BEFORE_ALL)
        if event.replay:
            canvas.rest("faults")
            worst["faults"] = f"step {event.step + 1} trained again"
        canvas.paint("weights", work.trained, time)
        canvas.paint("train", work.training, work.trained)
        canvas.paint("fetch", work.waited, work.fetched)
        self._named(canvas, worst, {"memory": "memory"}, (work.fetched, work.training))
        if self.phase is not None and self.phase[0].phase is Phase.TRAIN:  # the trainer loads what it had offloaded
            canvas.paint("memory", max(work.fetched, self.phase[1]), work.training)
        worst |= _longest(event.metrics)
        self._named(canvas, worst, BEFORE_THE_WAIT, (begin, began))
        batch = self._batch(event.step)
        if batch is not None:
            self._explain(canvas, worst, batch, began, work.waited)
        self._named(canvas, worst, IN_THE_WAIT, (began, work.waited))
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
        self._named(canvas, worst, IN_THE_WAIT | BEFORE_THE_WAIT)
        canvas.rest("end")
        done = StepTime(event.steps, self.boundary, time, dict(canvas.parts), worst)
        self._close(done)
        return done

    def _named(
        self, canvas: Canvas, worst: dict[str, str], kinds: Mapping[str, str], within: tuple[float, float] | None = None
    ) -> None:
        """Paint spans of some kinds, by the parts that they belong to; name the longest of each."""
        begin, end = within or (-math.inf, math.inf)
        running = [] if self.evaluation is None else [Named("evaluation", self.evaluation[0], math.inf, "running")]
        longest: dict[str, float] = {}
        for kind, part in kinds.items():
            for span in (*self.spans, *running):
                if span.kind != kind:
                    continue
                left, right = max(begin, span.begin), min(end, span.end)
                canvas.paint(part, left, right)
                if span.name and right - left > longest.get(part, 0.0) and canvas.parts.get(part):
                    longest[part], worst[part] = right - left, span.name

    def _batch(self, step: int) -> tuple[float, list[Life]] | None:
        """Take the groups of a batch."""
        found = self.batches.pop(step, None)
        if found is None:
            return None
        lives = [life for life in (self.lives.pop(group_id, None) for group_id in found[1]) if life is not None]
        for life in lives:
            life.ready = life.ready or life.completed or found[0]
        return found[0], lives

    def _explain(
        self, canvas: Canvas, worst: dict[str, str], batch: tuple[float, list[Life]], begin: float, end: float
    ) -> None:
        """Explain the wait for a batch by its groups, backwards from the one that was ready last."""
        ready, lives = batch
        if not lives:
            return
        tokens = sorted(life.last_token for life in lives if life.completed)
        tail = tokens[math.ceil(TAIL * len(tokens)) - 1] if tokens else math.inf
        chain = sorted((*lives, *self.ended, *self.lives.values()), key=lambda life: life.ready)
        chain = [life for life in chain if life.ready and life.ready <= ready]
        at = math.inf
        for _ in range(MAX_LINKS):
            while chain and chain[-1].ready > at:
                chain.pop()
            if not chain or at <= begin:
                break
            link = chain.pop() if at < math.inf else max(lives, key=lambda life: life.ready)
            self._paint(canvas, link, tail, begin, end)
            at = min(at, link.issued)
        worst |= _worst_of(lives)

    def _paint(self, canvas: Canvas, life: Life, tail: float, begin: float, end: float) -> None:
        """Paint the life of one group within the wait."""

        def paint(part: str, left: float, right: float) -> None:
            canvas.paint(part, max(begin, left), min(end, right))

        if not life.completed:  # it was given back or failed
            paint("rollout", life.issued, life.ready)
            return
        paint("filter", life.completed, life.ready)
        paint("scores", life.last_token, life.completed)
        applied = self.applied.get(life.min_version, 0.0)
        if applied > life.issued:  # it could not begin before
            paint("weights", life.issued, applied)
        paint("long tail", max(tail, life.begun), life.last_token)
        paint("rollout", life.begun, life.last_token)
        for span in self.spans:
            if span.kind == "faults":
                paint("faults", max(life.issued, span.begin), min(life.begun, span.end))
        paint("queue", life.issued, life.begun)


def _longest(metrics: Mapping[str, float]) -> dict[str, str]:
    """Name the longest part of training."""
    times = {name: metrics.get(f"perf/{name}_time", 0.0) for name in TRAINING}
    name = max(times, key=lambda name: times[name])
    return {"train": f"{name} {times[name]:.3f} s"} if times[name] else {}


def _worst_of(lives: Sequence[Life]) -> dict[str, str]:
    """Name the slowest groups of a batch."""
    done = [life for life in lives if life.completed]
    if not done:
        return {}
    slow, queued = max(done, key=lambda life: life.rollout_s), max(done, key=lambda life: life.begun - life.issued)
    graded, judged = max(done, key=lambda life: life.reward_s), max(done, key=lambda life: life.ready - life.completed)
    rollout = f"group {slow.group_id} on {slow.engine}: {slow.rollout_s:.3f} s"
    grader = f" by {graded.grader}" if graded.grader else ""
    of_engine = f" of {queued.engine}" if queued.engine else ""
    return {
        "rollout": rollout,
        "long tail": rollout,
        "queue": f"group {queued.group_id} before its slot{of_engine}: {queued.begun - queued.issued:.3f} s",
        "scores": f"group {graded.group_id}{grader}: {graded.reward_s:.3f} s",
        "filter": f"group {judged.group_id}: {judged.ready - judged.completed:.3f} s",
    }
