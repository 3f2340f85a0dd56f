"""The time breakdown: each step's wall time, split by hand-made logs whose parts are known."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import (
    ActorExited,
    ActorStarted,
    EvalEnded,
    EvalIssued,
    LastSample,
    Message,
    Outcome,
    RunFinished,
    TrainerStarted,
    WeightsApplied,
)
from messages.events import EngineUpdate
from runtime.report.breakdown import PARTS, Breakdown, Canvas, StepTime
from tests.build.events import announced, batch, completed, issued, saved, trained, verdict

Log = list[tuple[float, Message]]
LOADED = 10.0  # seconds from the first event to the trainer's start


def started() -> Log:
    return [
        (0.0, ActorStarted(actor="trainer", node="n", pid=1)),
        (LOADED, TrainerStarted(incarnation=1, step=0)),
        (LOADED, announced(1)),
    ]


def a_step(
    step: int,
    at: float,
    *,
    weights: float = 0.5,
    queue: float = 0.25,
    rollout: float = 2.0,
    tail: float = 1.0,
    scores: float = 0.5,
    filtered: float = 0.125,
    fetch: float = 0.125,
    train: float = 1.5,
    export: float = 0.25,
    checkpoint: float = 0.0,
) -> tuple[Log, float]:
    """The log of one step of ten groups from a time on, and the time of its end. Each duration is one part's."""
    begun = at + checkpoint
    groups = range(10 * step, 10 * step + 10)
    log: Log = [(begun, announced(step + 1, step)), (begun, issued(*groups, min_version=step + 1))]
    applied = begun + weights
    update = EngineUpdate(engine="engine.policy.1", pause_s=weights, took_s=weights)
    took = {"took_s": weights, "engines": (update,)}
    log.append((applied, WeightsApplied(version=step + 1, instance="rollout", num_engines=1, **took)))
    fields = {"reward_time_s": scores, "last_sample": LastSample(queue_time_s=queue, engine="e", grader="math")}
    for group_id in groups:
        # the first eight have their last token when the tail begins
        last_token = applied + queue + rollout + (tail if group_id % 10 >= 8 else 0.0)
        spent = {"rollout_time_s": last_token - applied} | fields
        log.append((last_token + scores, completed(group_id, **spent)))
        log.append((last_token + scores + filtered, verdict(group_id, 1)))
    ready = applied + queue + rollout + tail + scores + filtered
    end = ready + fetch + train + export
    metrics = {
        "perf/train_wait_time": ready - begun,
        "perf/fetch_time": fetch,
        "perf/train_time": train,
        "perf/optimizer_time": train,
        "perf/update_weights_time": export,
    }
    log += [(ready, batch(step, *((group_id, 1) for group_id in groups))), (end, trained(step, metrics=metrics))]
    if checkpoint:
        log.append((end + 0.5, saved(step, took_s=end + 0.5 - at, pause_s=checkpoint)))
    return sorted(log, key=lambda item: item[0]), end


def folded(*logs: Log) -> Breakdown:
    breakdown = Breakdown()
    for log in logs:
        for time, event in log:
            breakdown.apply(event, 1000.0 + time)
    return breakdown


def parts_of(step: StepTime) -> dict[str, float]:
    return {part: pytest.approx(seconds, abs=1e-6) for part, seconds in step.parts.items() if seconds > 1e-9}


def test_each_second_of_a_step_is_in_the_part_that_it_was_spent_on() -> None:
    log, _ = a_step(0, LOADED)
    (step,) = folded(started(), log).steps
    assert parts_of(step) == {
        "start": LOADED,
        "weights": 0.5 + 0.25,
        "queue": 0.25,
        "rollout": 2.0,
        "long tail": 1.0,
        "scores": 0.5,
        "filter": 0.125,
        "fetch": 0.125,
        "train": 1.5,
    }
    assert step.worst["scores"] == "group 0 by math: 0.500 s"
    assert step.worst["long tail"] == "group 8 on e: 3.250 s"
    assert (step.worst["train"], step.worst["weights"]) == ("optimizer 1.500 s", "v1 on engine.policy.1")


@pytest.mark.parametrize(
    ("delay", "part"),
    [
        ("scores", "scores"),
        ("filtered", "filter"),
        ("weights", "weights"),
        ("export", "weights"),
        ("queue", "queue"),
        ("checkpoint", "checkpoint"),
        ("fetch", "fetch"),
        ("train", "train"),
        ("tail", "long tail"),
    ],
)
def test_a_delay_of_a_second_is_in_its_part_alone(delay: str, part: str) -> None:
    usual, end = a_step(0, LOADED)
    without = folded(started(), usual, a_step(1, end)[0]).steps[1].parts
    times = {"scores": 0.5, "filtered": 0.125, "weights": 0.5, "export": 0.25, "queue": 0.25, "checkpoint": 0.0}
    times |= {"fetch": 0.125, "train": 1.5, "tail": 1.0}
    late = a_step(1, end, **{delay: times[delay] + 1.0})[0]
    step = folded(started(), usual, late).steps[1]
    grown = {name: step.parts.get(name, 0.0) - without.get(name, 0.0) for name in PARTS}
    assert {name: seconds for name, seconds in grown.items() if abs(seconds) > 1e-6} == {part: pytest.approx(1.0)}


def test_a_group_that_was_issued_for_a_dropped_one_is_explained_by_that_one() -> None:
    log: Log = [*started(), (10.0, issued(0)), (12.0, completed(0, rollout_time_s=2.0))]
    log += [(15.0, verdict(0, 1, Outcome.DROP)), (15.0, issued(1)), (16.0, completed(1, rollout_time_s=1.0))]
    log += [(16.5, verdict(1, 2)), (16.5, batch(0, (1, 2)))]
    log.append((17.0, trained(0, metrics={"perf/train_wait_time": 6.5, "perf/train_time": 0.5})))
    (step,) = folded(log).steps
    assert parts_of(step) == {"start": LOADED, "rollout": 3.0, "filter": 3.5, "train": 0.5}


def test_restarts_evaluations_and_stops_have_parts_of_their_own() -> None:
    first, end = a_step(0, LOADED)
    evaluation: Log = [
        (end, EvalIssued(incarnation=1, step=1, version=2, sets=())),
        (end + 3.0, EvalEnded(incarnation=1, step=1, version=2, metrics={})),
    ]
    crash: Log = [
        (end + 3.0, ActorExited(actor="trainer", node="n", pid=1, exit_code=-9, reason="killed", restart_in_s=1.0)),
        (end + 4.0, ActorStarted(actor="trainer", node="n", pid=2, restarts=1)),
        (end + 8.0, TrainerStarted(incarnation=2, step=1)),
    ]
    second, last = a_step(1, end + 8.0)
    run = folded(
        started(), first, evaluation, crash, second, [(last + 1.0, RunFinished(incarnation=1, steps=2, reason=""))]
    )
    assert run.steps[1].parts["faults"] == pytest.approx(5.0)
    assert run.steps[1].worst["faults"] == "trainer"
    assert run.steps[2].parts == {"end": pytest.approx(1.0)}
    assert math.fsum(run.totals.values()) == pytest.approx(last + 1.0)
    again: Log = [(last + 100.0, ActorStarted(actor="trainer", node="n", pid=9))]
    resumed = folded(started(), first, again)
    assert resumed.stopped_s == pytest.approx(last + 100.0 - end)
    assert math.fsum(resumed.totals.values()) == pytest.approx(end)


def test_a_step_without_times_is_unexplained_and_says_so() -> None:
    run = folded(started(), [(30.0, trained(0))])
    assert run.steps[0].parts == {"start": LOADED, "unexplained": pytest.approx(20.0)}
    assert [line.split()[0] for line in run.lines()[1:]] == ["unexplained", "start"]
    assert Breakdown().lines() == ["no step has ended yet"]


seconds = st.floats(0, 30)
times = {
    name: seconds
    for name in ("weights", "queue", "rollout", "tail", "scores", "filtered", "fetch", "train", "export", "checkpoint")
}


@given(st.lists(st.fixed_dictionaries(times), min_size=1, max_size=4))
def test_the_parts_of_a_step_add_up_to_it(steps: Sequence[dict[str, Any]]) -> None:
    logs, at = [started()], LOADED
    for number, times in enumerate(steps):
        log, at = a_step(number, at, **times)
        logs.append(log)
    run = folded(*logs)
    for step in run.steps:
        assert math.fsum(step.parts.values()) == pytest.approx(step.end - step.begin, abs=1e-6)
        assert min(step.parts.values()) >= 0
    assert run.totals.get("unexplained", 0.0) <= 0.02 * math.fsum(run.totals.values()) + 1e-6
    assert set(run.totals) <= set(PARTS)


@given(st.lists(st.tuples(seconds, seconds), max_size=12))
def test_a_moment_has_one_part(spans: list[tuple[float, float]]) -> None:
    canvas = Canvas(5.0, 25.0)
    painted = math.fsum(canvas.paint("part", begin, end) for begin, end in spans)
    canvas.rest("rest")
    assert math.fsum(canvas.parts.values()) == pytest.approx(20.0)
    assert canvas.parts["part"] == pytest.approx(painted)
