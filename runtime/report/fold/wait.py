"""What the wall time of a train step was for, painted part by part: each second has one part, so that they add up.

The wait for a batch is explained backwards from it: by the group that was ready last, its verdict, its scores, its
tokens and its queue, then by the group whose end led to the issue of that one, and so on. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from runtime.report.fold.spans import Canvas, Life, Span

TAIL: Final = 0.8  # share of a batch's groups that have their last token when the long tail begins
MAX_LINKS: Final = 256  # groups in the chain that explains one wait
BEFORE_ALL: Final = {
    "no trainer": "faults",
    "first weights": "weights",
}  # parts of spans by their kind, in order of precedence
BEFORE_THE_WAIT: Final = {
    "evaluation by the trainer": "evaluation",
    "checkpoint": "checkpoint",
    "sync": "weights",
    "phase update": "weights",
    "memory": "memory",
    "writing": "checkpoint",
    "first load": "start",
    "weights": "weights",
}
BLOCKED: Final = {"blocked": "blocked"}
IN_THE_WAIT: Final = {
    "faults": "faults",
    "evaluation": "evaluation",
    "sync": "weights",
    "first load": "start",
    "weights": "weights",
    "phase update": "weights",
    "memory": "memory",
    "checkpoint": "checkpoint",
}
READY: Final = attrgetter("ready")
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


def paint_spans(
    canvas: Canvas,
    worst: dict[str, str],
    spans: Sequence[Span],
    kinds: Mapping[str, str],
    within: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Paint spans of some kinds, by the parts that they belong to; name the longest of each."""
    begin, end = within
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
    loaded: float,
    faults: Sequence[Span],
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
        loaded: time at which engines first held any since the run was started.
        faults: restarts of processes.
    """
    if not batch:
        return
    tokens = sorted(life.last_token for life in batch if life.completed)
    tail = tokens[math.ceil(TAIL * len(tokens)) - 1] if tokens else math.inf
    begun = within[0]
    chain = [life for life in (*batch, *others) if begun < life.ready <= ready]
    chain.sort(key=READY)
    at = math.inf
    for _ in range(MAX_LINKS):
        while chain and chain[-1].ready > at:
            chain.pop()
        if not chain or at <= within[0]:
            break
        link = chain.pop() if at < math.inf else max(batch, key=READY)
        _paint_life(canvas, link, tail, within, applied, loaded, faults)
        at = min(at, link.issued)
    worst |= _worst_of(batch)


def _paint_life(
    canvas: Canvas,
    life: Life,
    tail: float,
    within: tuple[float, float],
    applied: Mapping[int, float],
    loaded: float,
    faults: Sequence[Span],
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
        paint("start" if held == loaded else "weights", life.issued, held)
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
    slow = max(done, key=lambda life: life.last_token - life.begun)
    queued = max(done, key=lambda life: life.begun - life.issued)
    graded = max(done, key=lambda life: life.completed - life.last_token)
    judged = max(done, key=lambda life: life.ready - life.completed)
    rollout = f"group {slow.group_id} on {slow.engine}: {slow.last_token - slow.begun:.3f} s"
    grader = f" by {graded.grader}" if graded.grader else ""
    of_engine = f" of {queued.engine}" if queued.engine else ""
    return {
        "rollout": rollout,
        "long tail": rollout,
        "queue": f"group {queued.group_id} before its slot{of_engine}: {queued.begun - queued.issued:.3f} s",
        "scores": f"group {graded.group_id}{grader}: {graded.completed - graded.last_token:.3f} s",
        "filter": f"group {judged.group_id}: {judged.ready - judged.completed:.3f} s",
    }
