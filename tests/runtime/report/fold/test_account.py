"""The time breakdown: each step's wall time, split by hand-made logs whose parts are known."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.observer.perfetto import Trace
from messages import (
    ActorExited,
    ActorStarted,
    EvalEnded,
    EvalIssued,
    EventLoopBlocked,
    LastSample,
    Message,
    Outcome,
    Phase,
    PhaseChanged,
    RunFinished,
    RunStopped,
    TrainerStarted,
    WeightsApplied,
)
from messages.events import EngineUpdate
from runtime.report.fold.account import Account
from runtime.report.fold.spans import PARTS, Canvas, Span, StepTime
from runtime.report.times import time_lines
from tests.build.events import announced, batch, completed, issued, saved, trained, verdict

Log = list[tuple[float, Message]]
LOADED = 10.0  # seconds from the first event to the trainer's start


def started() -> Log:
    return [
        (0.0, ActorStarted(actor="buffer", node="n", pid=1)),
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


def folded(*logs: Log) -> Account:
    account = Account()
    for log in logs:
        for time, event in log:
            account.apply(event, 1000.0 + time)
    return account


def steps_of(*logs: Log) -> list[StepTime]:
    """The trained steps."""
    return [step for step in folded(*logs).steps if step.what == "step"]


def parts_of(step: StepTime) -> dict[str, float]:
    return {part: pytest.approx(seconds, abs=1e-6) for part, seconds in step.parts.items() if seconds > 1e-9}


def test_each_second_of_a_step_is_in_the_part_that_it_was_spent_on() -> None:
    log, _ = a_step(0, LOADED)
    start, step = folded(started(), log).steps
    assert (start.label, start.parts, step.label) == ("start", {"start": LOADED}, "step 1")
    assert parts_of(step) == {
        "start": 0.5,  # the engines load their first weights
        "weights": 0.25,
        "queue": 0.25,
        "rollout": 2.0,
        "long tail": 1.0,
        "scores": 0.5,
        "filter": 0.125,
        "fetch": 0.125,
        "train": 1.5,
    }
    assert step.worst["queue"] == "group 0 before its slot of e: 0.750 s"
    assert step.worst["scores"] == "group 0 by math: 0.500 s"
    assert step.worst["long tail"] == "group 8 on e: 3.000 s"
    assert (step.worst["train"], step.worst["start"]) == ("optimizer 1.500 s", "v1 on engine.policy.1")


def test_engines_that_start_are_no_weight_update_and_later_versions_are() -> None:
    """SGLang takes minutes from its start to its first weights."""
    first, end = a_step(0, LOADED, weights=120.0)
    second, _ = a_step(1, end)
    one, two = steps_of(started(), first, second)
    assert (one.parts["start"], one.parts["weights"]) == pytest.approx((120.0, 0.25))
    assert folded(started(), first).recent_s == pytest.approx([one.seconds - 120.0])  # what remaining steps will take
    assert (two.parts.get("start", 0.0), two.worst["weights"]) == (0.0, "v2 on engine.policy.1")
    again = [(1000.0 + at, event) for at, event in started()]
    third, _ = a_step(2, 1000.0 + LOADED, weights=60.0)
    assert steps_of(started(), first, second, again, third)[2].parts["start"] == pytest.approx(60.0)


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
    without = steps_of(started(), usual, a_step(1, end)[0])[1].parts
    times = {"scores": 0.5, "filtered": 0.125, "weights": 0.5, "export": 0.25, "queue": 0.25, "checkpoint": 0.0}
    times |= {"fetch": 0.125, "train": 1.5, "tail": 1.0}
    late = a_step(1, end, **{delay: times[delay] + 1.0})[0]
    step = steps_of(started(), usual, late)[1]
    grown = {name: step.parts.get(name, 0.0) - without.get(name, 0.0) for name in PARTS}
    assert {name: seconds for name, seconds in grown.items() if abs(seconds) > 1e-6} == {part: pytest.approx(1.0)}


def test_a_group_that_was_issued_for_a_dropped_one_is_explained_by_that_one() -> None:
    log: Log = [*started(), (10.0, issued(0)), (12.0, completed(0, rollout_time_s=2.0))]
    log += [(15.0, verdict(0, 1, Outcome.DROP)), (15.0, issued(1)), (16.0, completed(1, rollout_time_s=1.0))]
    log += [(16.5, verdict(1, 2)), (16.5, batch(0, (1, 2)))]
    log.append((17.0, trained(0, metrics={"perf/train_wait_time": 6.5, "perf/train_time": 0.5})))
    (step,) = steps_of(log)
    assert parts_of(step) == {"rollout": 3.0, "filter": 3.5, "train": 0.5}


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
    assert [step.label for step in run.steps] == ["start", "step 1", "step 2", "end"]
    assert run.steps[2].parts["faults"] == pytest.approx(5.0)
    assert run.steps[2].worst["faults"] == "trainer"
    assert run.steps[3].parts == {"end": pytest.approx(1.0)}
    assert math.fsum(run.totals.values()) == pytest.approx(last + 1.0)
    again: Log = [(last + 100.0, ActorStarted(actor="buffer", node="n", pid=9))]
    resumed = folded(started(), first, again)
    assert resumed.stopped_s == pytest.approx(last + 100.0 - end)
    assert math.fsum(resumed.totals.values()) == pytest.approx(end)


def home_of(bus: bool, at: float) -> Log:
    names = (("nats-server",) if bus else ()) + ("buffer", "trainer")
    return [(at, ActorStarted(actor=name, node="home", pid=1)) for name in names]


@pytest.mark.parametrize("bus", [True, False])
def test_a_start_that_fails_before_its_trainer_is_there_is_over_when_the_run_is_started_again(bus: bool) -> None:
    failed: Log = [*home_of(bus, 0.0), (20.0, RunStopped(node="home", reason="no model", exit_code=1))]
    loaded: Log = [(36_000.0 + LOADED, TrainerStarted(incarnation=1, step=0)), (36_000.0 + LOADED, announced(1))]
    step, _ = a_step(0, 36_000.0 + LOADED)
    run = folded(failed, home_of(bus, 36_000.0), loaded, step)
    assert run.stopped_s == pytest.approx(36_000.0 - 20.0)
    assert [(step.label, step.parts) for step in run.steps[:2]] == [
        ("lost", {"faults": pytest.approx(20.0)}),
        ("start", {"start": pytest.approx(LOADED)}),
    ]
    assert math.fsum(run.totals.values()) == pytest.approx(math.fsum(step.seconds for step in run.steps))


@pytest.mark.parametrize("bus", [True, False])
def test_the_daemon_of_another_node_may_start_again_while_the_run_goes_on(bus: bool) -> None:
    first, end = a_step(0, LOADED)
    worker: Log = [(end + 1.0, ActorStarted(actor="rollout.1", node="other", pid=7))]
    loaded: Log = [(LOADED, TrainerStarted(incarnation=1, step=0)), (LOADED, announced(1))]
    second, last = a_step(1, end)
    run = folded(
        home_of(bus, 0.0), [(1.0, worker[0][1])], loaded, first, sorted([*worker, *second], key=lambda e: e[0])
    )
    assert run.stopped_s == 0.0
    assert run.steps[2].begin == pytest.approx(1000.0 + end)
    assert math.fsum(run.totals.values()) == pytest.approx(last)


def colocated_step() -> Log:
    """A wait of 4 s, a fetch of 0.5 s, then the memory is taken, training, and from 16.5 s on it is given back."""
    metrics = {
        "perf/train_wait_time": 4.0,
        "perf/fetch_time": 0.5,
        "perf/train_time": 2.0,
        "perf/update_weights_time": 0.25,
        "perf/step_time": 9.25,
    }
    order = (Phase.RELEASE, Phase.TRAIN, Phase.OFFLOAD, Phase.RESUME_WEIGHTS, Phase.UPDATE, Phase.RESUME_KV)
    times = (14.5, 16.0, 19.25, 20.0, 21.0, 24.0, 24.5)
    log: Log = [*started(), (10.0, issued(0)), (14.0, completed(0, rollout_time_s=4.0)), (14.0, verdict(0, 1))]
    log += [(14.0, batch(0, (0, 1))), (19.25, trained(0, metrics=metrics))]
    previous = Phase.GENERATE
    for time, phase in zip(times, (*order, Phase.GENERATE), strict=True):
        log.append((time, PhaseChanged(phase=phase, previous=previous, step=0, incarnation=1, took_s=1.5)))
        previous = phase
    again = metrics | {"perf/train_wait_time": 0.0, "perf/fetch_time": 0.0, "perf/step_time": 2.25}
    return sorted([*log, (26.75, trained(1, metrics=again))], key=lambda item: item[0])


def test_memory_that_trainer_and_engines_share_has_a_part_of_its_own() -> None:
    first, second = steps_of(colocated_step())
    # from 14.5 s to 17.0 s engines release their memory and the trainer loads its state
    expected = {"rollout": 4.0, "fetch": 0.5, "memory": 2.5, "train": 2.0, "weights": 0.25}
    assert parts_of(first) == expected
    assert parts_of(second) == {"memory": 2.25, "weights": 3.0 + 0.25, "train": 2.0}
    assert second.worst["memory"] == "phase resume_weights"


def test_weights_that_engines_read_after_a_step_are_no_unexplained_time() -> None:
    log: Log = [*started(), (12.0, trained(0, metrics={"perf/train_time": 2.0, "perf/step_time": 2.0}))]
    log.insert(-1, (10.5, WeightsApplied(version=1, instance="rollout", num_engines=1, took_s=0.5)))
    log += [(15.0, WeightsApplied(version=2, instance="rollout", num_engines=1, took_s=3.0))]
    log += [(16.0, trained(1, metrics={"perf/train_time": 1.0, "perf/step_time": 1.0}))]
    assert parts_of(steps_of(log)[1]) == {"weights": 3.0, "train": 1.0}


def test_a_trace_places_wait_and_memory_where_they_were() -> None:
    trace, spans, account = Trace(), list[Span](), Account()
    for time, event in colocated_step():
        account.apply(event, 1000.0 + time, spans)
    trace.add(spans, account.began)
    found = {event["name"]: event["ts"] / 1e6 for event in reversed(trace.events) if event["ph"] == "X"}
    assert {name: found[name] for name in ("rollout", "fetch", "memory", "train", "release")} == {
        "rollout": 10.0,
        "fetch": 14.0,
        "memory": 14.5,
        "train": 17.0,
        "release": 14.5,
    }


def test_a_long_queue_is_put_down_to_the_slots_of_the_engines() -> None:
    log, _ = a_step(0, LOADED, queue=30.0)
    assert time_lines(folded(started(), log))[-1].endswith(
        "all slots of the engines are taken, so the engines are the limit"
    )
    log, _ = a_step(0, LOADED)
    assert not any("slots" in line for line in time_lines(folded(started(), log)))


def a_block(seconds: float, *, ended: bool = True) -> EventLoopBlocked:
    """The rollout actor was blocked by a user's call."""
    place = {"function": "rollout.custom_generate", "place": "mylib.py:12 in with_tool"}
    return EventLoopBlocked(actor="rollout", node="n", pid=1, blocked_s=seconds, ended=ended, **place)


@pytest.mark.parametrize("reported_late", [False, True])
def test_the_wait_for_a_blocked_event_loop_is_charged_to_the_call(reported_late: bool) -> None:
    """Without the block the wait would be that of the weights, which the blocked actor did not bring to its engines."""
    log, end = a_step(0, LOADED, weights=20.0)
    block = a_block(10.0, ended=False) if reported_late else a_block(18.0)
    at = LOADED + 12.0 if reported_late else LOADED + 20.0  # of 2 s after the begin of the step
    before, after = [item for item in log if item[0] <= at], [item for item in log if item[0] > at]
    (step,) = steps_of(started(), before, [(at, block)], after)
    assert step.worst["blocked"] == "rollout.custom_generate: mylib.py:12 in with_tool"
    if not reported_late:
        assert step.parts["blocked"] == pytest.approx(18.0)
        assert (step.parts["start"], step.parts["weights"]) == pytest.approx((2.0, 0.25))
    assert step.parts["train"] == pytest.approx(1.5)  # the trainer's own work stays its own
    assert math.fsum(step.parts.values()) == pytest.approx(end - LOADED)


def test_a_step_without_times_is_unexplained_and_says_so() -> None:
    run = folded(started(), [(30.0, trained(0))])
    assert run.steps[1].parts == {"unexplained": pytest.approx(20.0)}
    assert [line.split()[0] for line in time_lines(run)[1:]] == ["unexplained", "start"]
    assert time_lines(Account()) == ["no step has ended yet"]


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
        assert min(step.parts.values(), default=0.0) >= 0
    assert run.totals.get("unexplained", 0.0) <= 0.02 * math.fsum(run.totals.values()) + 1e-6
    assert set(run.totals) <= set(PARTS)


@given(st.lists(st.tuples(seconds, seconds), max_size=12))
def test_a_moment_has_one_part(spans: list[tuple[float, float]]) -> None:
    canvas = Canvas(5.0, 25.0)
    painted = math.fsum(canvas.paint("part", begin, end) for begin, end in spans)
    canvas.rest("rest")
    assert math.fsum(canvas.parts.values()) == pytest.approx(20.0)
    assert canvas.parts["part"] == pytest.approx(painted)
