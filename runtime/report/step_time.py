"""The wall time of one train step, painted part by part: each second has one part, so that they add up to the step.

The wait for a batch is explained backwards from it: by the group that was ready last, its verdict, its scores, its
tokens and its queue, then by the group whose end led to the issue of that one, and so on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

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


def paint_spans(
    canvas: Canvas,
    worst: dict[str, str],
    spans: Sequence[Named],
    kinds: Mapping[str, str],
    within: tuple[float, float] | None = None,
) -> None:
    """Paint spans of some kinds, by the parts that they belong to; name the longest of each."""
    begin, end = within or (-math.inf, math.inf)
    longest: dict[str, float] = {}
    for kind, part in kinds.items():
        for span in spans:
            if span.kind != kind:
                continue
            left, right = max(begin, span.begin), min(end, span.end)
            canvas.paint(part, left, right)
            if span.name and right - left > longest.get(part, 0.0) and canvas.parts.get(part):
                longest[part], worst[part] = right - left, span.name


def paint_wait(
    canvas: Canvas,
    worst: dict[str, str],
    batch: Sequence[Life],
    others: Iterable[Life],
    ready: float,
    within: tuple[float, float],
    *,
    applied: Mapping[int, float],
    faults: Sequence[Named],
) -> None:
    """Explain the wait for a batch by its groups, backwards from the one that was ready last.

    Args:
        canvas: of the step.
        worst: by part, what was worst; it gets the slowest groups.
        batch: groups of the batch.
        others: other groups, whose end may have led to the issue of one of the batch.
        ready: time at which the batch was ready.
        within: begin and end of the wait.
        applied: time at which engines first held a version.
        faults: restarts of processes.
    """
    if not batch:
        return
    tokens = sorted(life.last_token for life in batch if life.completed)
    tail = tokens[math.ceil(TAIL * len(tokens)) - 1] if tokens else math.inf
    chain = sorted((*batch, *others), key=lambda life: life.ready)
    chain = [life for life in chain if life.ready and life.ready <= ready]
    at = math.inf
    for _ in range(MAX_LINKS):
        while chain and chain[-1].ready > at:
            chain.pop()
        if not chain or at <= within[0]:
            break
        link = chain.pop() if at < math.inf else max(batch, key=lambda life: life.ready)
        _paint_life(canvas, link, tail, within, applied, faults)
        at = min(at, link.issued)
    worst |= _worst_of(batch)


def _paint_life(
    canvas: Canvas,
    life: Life,
    tail: float,
    within: tuple[float, float],
    applied: Mapping[int, float],
    faults: Sequence[Named],
) -> None:
    """Paint the life of one group within the wait."""

    def paint(part: str, left: float, right: float) -> None:
        canvas.paint(part, max(within[0], left), min(within[1], right))

    if not life.completed:  # it was given back or failed
        paint("rollout", life.issued, life.ready)
        return
    paint("filter", life.completed, life.ready)
    paint("scores", life.last_token, life.completed)
    held = applied.get(life.min_version, 0.0)
    if held > life.issued:  # it could not begin before
        paint("weights", life.issued, held)
    paint("long tail", max(tail, life.begun), life.last_token)
    paint("rollout", life.begun, life.last_token)
    for span in faults:
        paint("faults", max(life.issued, span.begin), min(life.begun, span.end))
    paint("queue", life.issued, life.begun)


def longest_of_training(metrics: Mapping[str, float]) -> dict[str, str]:
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
