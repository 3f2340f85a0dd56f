"""What observers show of a run, folded from hand-made logs."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.observer.observed import KEPT_COURSE, KEPT_ENDINGS, KEPT_ROWS, Observed, Thinned
from messages import (
    ActorExited,
    ActorStarted,
    EngineLoad,
    EngineState,
    EngineStateChanged,
    EvalEnded,
    EvalIssued,
    GroupsIssued,
    LastSample,
    Message,
    Outcome,
    Phase,
    PhaseChanged,
    RunFinished,
    RunStalled,
    WeightsApplied,
)
from messages.events import EngineUpdate
from runtime.ledger.fold import LedgerState, fold
from tests.build.events import announced, batch, completed, issued, saved, snapshot, trained, verdict
from tests.support.archived_run import events_of_a_run
from tests.support.log_of_a_run import LOG, THE_END


def folded(*events: Message, first_seq: int = 1, kept_rows: int = KEPT_ROWS) -> Observed:
    observed = Observed("r", 2, kept_rows=kept_rows)
    for seq, event in enumerate(events, first_seq):
        observed.apply(event, seq, 1000.0 + seq)
    return observed


def test_a_log_becomes_rows_books_and_endings() -> None:
    observed = folded(*LOG)
    assert observed.ledger()["books"] == msgspec.to_builtins(observed._report.ledger.books())
    assert (observed.ledger()["books"]["trained"], observed.steps, observed.num_events) == (4, 2, len(LOG))
    assert {(ending["outcome"], ending["reason"]) for ending in observed.ledger()["endings"]} >= {
        ("dropped", "zero_std"),
        ("failed", "no score"),
    }
    assert [row["step"] for row in observed.curves()] == [1]  # the newest one may still get an evaluation
    in_flight = observed.ledger()["stages"]["in_flight"]
    assert in_flight == {"count": 1, "groups": in_flight["groups"]}
    msgspec.json.encode(
        [observed.now(), observed.ledger(), observed.times(), observed.curves()]
    )  # JSON holds all of it


def test_processes_and_engines_have_their_newest_state() -> None:
    update = EngineUpdate(engine="engine.policy.0", pause_s=0.5, took_s=1.5)
    observed = folded(
        ActorStarted(actor="reward", node="n", pid=7),
        EngineStateChanged(
            instance="rollout",
            engine="engine.policy.0",
            old=EngineState.SUSPECT,
            new=EngineState.PAUSED,
            reason="x",
            version=2,
        ),
        WeightsApplied(version=3, instance="rollout", num_engines=1, took_s=2.0, engines=(update,)),
        ActorExited(actor="reward", node="n", pid=7, exit_code=-9, reason="killed", restart_in_s=1.0),
    )
    (process,), (engine,) = observed.now()["processes"], observed.now()["engines"]
    assert (process["is_up"], process["reason"], process["since"]) == (False, "killed", 1004.0)
    assert (engine["state"], engine["version"], engine["update_s"], engine["pause_s"]) == ("paused", 3, 1.5, 0.5)


def test_an_engine_has_the_load_of_the_last_group_that_ended_there() -> None:
    early = EngineLoad(samples=9, running=8)
    loads = (
        LastSample(engine="a", load=early),
        LastSample(engine="b"),
        LastSample(engine="a", load=EngineLoad(samples=6, running=5, waiting=2, cache_usage=0.45)),
    )
    (engine,) = folded(*(completed(group, last_sample=last) for group, last in enumerate(loads))).now()["engines"]
    names = ("name", "samples", "running", "waiting", "cache_usage", "load_at")
    assert [engine[name] for name in names] == ["a", 6, 5, 2, 0.45, 1003.0]


def test_a_stall_is_shown_until_something_happens_and_an_end_until_the_next_start() -> None:
    stalled = RunStalled(idle_s=300.0, waiting={"trainer": "batch 3"})
    assert folded(stalled).now()["waiting"] == {"trainer": "batch 3"}
    assert folded(stalled, issued(0)).now()["waiting"] == {}
    finished = RunFinished(incarnation=1, steps=2, reason="all steps trained")
    stopped = ActorExited(actor="reward", node="n", pid=7, exit_code=0, reason="stopped")
    assert folded(finished, stopped).now()["ended"] == "finished: all steps trained"
    assert folded(finished, stopped, issued(0)).now()["ended"] == ""


def test_a_log_without_its_first_part_begins_with_a_snapshot() -> None:
    state = LedgerState()
    for seq, event in enumerate((announced(1), issued(0, 1), completed(0), verdict(0, 3)), 1):
        for _ in fold(state, event, seq):
            pass
    observed = folded(snapshot(state), completed(1), verdict(1, 11), first_seq=10)
    assert observed.ledger()["books"]["ready"] == 2
    assert observed.now()["first_seq"] == 10


def test_an_evaluation_that_ends_late_completes_its_row_and_is_news() -> None:
    events = list[Message]()
    for step in range(22):
        seq = len(events) + 2
        events += [issued(step), completed(step), verdict(step, seq), batch(step, (step, seq)), trained(step)]
        events += [EvalIssued(incarnation=1, step=1, version=2, sets=())] if step == 0 else []
    observed = folded(*events)
    before = observed.curves()
    ended = EvalEnded(incarnation=1, step=1, version=2, metrics={"eval/x": 0.75})
    observed.apply(ended, observed.seq + 1, 3000.0)
    assert [row["step"] for row in before] == [row["step"] for row in observed.curves()] == list(range(1, 23))
    news = observed.curves(observed.seq - 1)
    assert [(row["step"], row.get("eval/x")) for row in news] == [(1, 0.75), (22, None)]


def test_its_memory_is_bounded() -> None:
    thinned = Thinned(10)
    for number in range(1000):
        thinned.add(number)
    assert 10 <= len(thinned.items) < 20
    assert thinned.items == sorted(thinned.items)
    assert thinned.items[-1] > 900
    kept_rows, events = 100, list[Message]()
    for step in range(3 * kept_rows):
        kept, dull = 2 * step, 2 * step + 1
        events += [issued(kept, dull), completed(kept), completed(dull)]
        seq = len(events) - 1
        events += [verdict(kept, seq), verdict(dull, seq + 1, Outcome.DROP, reason="dull"), batch(step, (kept, seq))]
        events.append(trained(step, metrics={"train/loss": 0.5}))
    observed = folded(*events, kept_rows=kept_rows)
    assert observed.steps == 3 * kept_rows
    assert kept_rows <= len(observed.curves()) <= 2 * kept_rows
    assert len(observed.now()["course"]) < 2 * KEPT_COURSE
    assert len(observed.ledger()["endings"]) == KEPT_ENDINGS
    assert len(observed._changed) == len(observed.rows.items)
    kept = observed.account
    assert (len(kept.lives), len(kept.ended), len(kept.batches), len(kept.spans)) == (0, 0, 0, 0)


MIXED: tuple[Message, ...] = (  # what the log of a small run lacks
    ActorExited(actor="reward", node="n", pid=7, exit_code=-9, reason="killed", restart_in_s=1.0),
    ActorStarted(actor="reward", node="n", pid=8, restarts=1),
    ActorStarted(actor="buffer", node="n", pid=9),
    EngineStateChanged(
        instance="rollout", engine="e", old=EngineState.SUSPECT, new=EngineState.PAUSED, reason="x", version=2
    ),
    WeightsApplied(version=3, instance="rollout", num_engines=1, took_s=2.0),
    EvalEnded(incarnation=1, step=2, version=3, metrics={"eval/x": 0.75}),
    PhaseChanged(incarnation=1, step=1, phase=Phase.TRAIN, previous=Phase.UPDATE, took_s=0.5, reason="x"),
    RunStalled(idle_s=300.0, waiting={"trainer": "batch 3"}),
    saved(3, took_s=5.0, pause_s=4.0),
    THE_END,
)
NOT_FINITE = EvalEnded(incarnation=1, step=1, version=3, metrics={"eval/x": float("nan"), "eval/y": float("inf")})


def views(observed: Observed) -> bytes:
    shown = (observed.now(), observed.ledger(), observed.times(), observed.curves(), observed.curves(observed.seq // 2))
    return msgspec.json.encode(shown)


def interrupted(events: Sequence[Message], cuts: set[int], kept_rows: int) -> Observed:
    """The fold of events by several processes, each from the snapshot of the one before."""
    observed = Observed("r", 2, kept_rows=kept_rows)
    for seq, event in enumerate(events, 1):
        observed.apply(event, seq, 1000.0 + seq)
        if seq in cuts:
            observed = Observed.decoded(observed.encoded())
    return observed


@pytest.mark.parametrize("kept_rows", [KEPT_ROWS, 3])
def test_a_fold_goes_on_from_a_snapshot_at_any_event(kept_rows: int) -> None:
    events = (*LOG, *MIXED, *events_of_a_run(500, samples=1))
    whole = folded(*events, kept_rows=kept_rows)
    each = interrupted(events, set(range(1, len(events), 5)), kept_rows)
    assert views(each) == views(whole)
    assert each == whole


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from((*LOG, *MIXED, NOT_FINITE)), max_size=60), st.sets(st.integers(1, 60), max_size=4))
def test_a_snapshot_loses_nothing_of_any_log(events: list[Message], cuts: set[int]) -> None:
    whole, parts = folded(*events, kept_rows=2), interrupted(events, cuts, 2)
    assert views(parts) == views(whole)


@pytest.mark.parametrize("num_steps", [4, 19])
def test_a_step_more_sends_a_page_as_little_after_many_steps_as_after_few(num_steps: int) -> None:
    """With a bound of five rows for a thousand."""
    events = list[Message](events_of_a_run(70 * num_steps, samples=1))[:-1]
    last = max(place for place, event in enumerate(events) if isinstance(event, GroupsIssued))
    observed = folded(*events[:last], kept_rows=5)
    assert observed.steps >= num_steps - 1
    assert len(observed.curves()) <= min(observed.steps, 10)
    assert len(observed.times()["steps"]) <= min(observed.steps + 1, 10)  # one is the start
    since, from_step = observed.seq, observed.steps
    for seq, event in enumerate(events[last:], since + 1):
        observed.apply(event, seq, 1000.0 + seq)
    sent = observed.curves(since)
    assert sent[-1]["step"] == observed.steps
    assert len(sent) <= 2  # the one that was open, and the new one
    assert 1 <= len(observed.times(from_step)["steps"]) <= 2


def test_a_late_checkpoint_changes_times_after_a_snapshot_too() -> None:
    events = list[Message](events_of_a_run(160, samples=1))[:-1]
    pause = msgspec.structs.replace(saved(2, took_s=30.0), pause_s=25.0)
    whole, parts = folded(*events, pause), interrupted([*events, pause], {len(events)}, KEPT_ROWS)
    assert whole.times() != folded(*events).times()
    assert parts.times() == whole.times()
