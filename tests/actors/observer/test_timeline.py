"""The timeline: which spans belong to which steps and groups, and that it is bounded."""

from typing import Any

import msgspec
import pytest

from actors.observer.timeline import KEPT_SPANS, MAX_BARS, Bar, Timeline
from messages import EvalEnded, EvalIssued, LastSample, WeightsApplied
from messages.events import EngineUpdate
from runtime.report.fold.account import Account
from runtime.report.fold.spans import Span
from tests.build.events import batch, completed, issued, trained, verdict
from tests.build.samples import summary
from tests.runtime.report.fold.test_account import LOADED, Log, a_step, started


def folded(log: Log) -> Timeline:
    return told(Account(), Timeline(), log)


def told(account: Account, timeline: Timeline, log: Log) -> Timeline:
    for time, event in log:
        spans: list[Span] = []
        account.apply(event, time, spans)
        timeline.take(spans, account.step)
    return timeline


def steps(number: int) -> tuple[Log, list[float]]:
    """The log of some steps of ten groups, and the ends of the steps."""
    log, at, ends = started(), LOADED, list[float]()
    for step in range(number):
        more, at = a_step(step, at)
        log += more
        ends.append(at)
    return log, ends


def test_a_window_has_the_spans_of_its_steps() -> None:
    log, ends = steps(8)
    timeline = folded(log)
    window = timeline.window(5, 2)
    assert (window.first, window.last, window.oldest, window.newest) == (4, 5, 1, 8)
    assert (window.begin, window.end) == pytest.approx((ends[2], ends[4]))
    assert [number for number, _, _ in window.steps] == [4, 5]
    of_groups = {bar.group for bar in window.bars if bar.kind == "rollout"}
    assert of_groups == set(range(30, 50))
    trains = {bar.step: (bar.begin, bar.end) for bar in window.bars if bar.name == "train"}
    assert trains[5] == pytest.approx((ends[4] - 1.75, ends[4] - 0.25))  # 1.5 s, and then 0.25 s of export
    newest = timeline.window(0, 3)
    assert (newest.first, newest.last) == (6, 8)
    assert timeline.window(999, 999).first == 1
    assert Timeline().window().bars == []


def test_a_group_is_found_in_all_lanes() -> None:
    update = EngineUpdate(engine="engine.policy.0", pause_s=0.5, took_s=1.0)
    samples = (summary(0, (1, 0), first_version=2, last_version=3),)
    fields: dict[str, Any] = {
        "rollout_time_s": 2.0,
        "reward_time_s": 0.5,
        "last_sample": LastSample(engine="e", grader="math"),
    }
    metrics = {"perf/train_wait_time": 4.0, "perf/train_time": 1.0}
    log: Log = [
        (10.0, WeightsApplied(version=3, instance="rollout", num_engines=1, took_s=1.0, engines=(update,))),
        (10.0, issued(7)),
        (12.5, completed(7, samples=samples, **fields)),
        (13.0, verdict(7, 3)),
        (14.0, batch(0, (7, 3))),
        (15.0, trained(0, metrics=metrics)),
        (15.0, EvalIssued(incarnation=1, step=1, version=4, sets=())),
        (16.0, EvalEnded(incarnation=1, step=1, version=4, metrics={})),
    ]
    found = folded(log).window(0, 1).bars
    bars = {bar.kind: bar for bar in found}
    assert bars["rollout"] == Bar("rollout", "e", "rollout", 10.0, 12.0, 7, 1, (2, 3))
    assert bars["scores"] == Bar("scores", "math", "scores", 12.0, 12.5, 7, 1, (2, 3))
    assert bars["filter"] == Bar("filter", "", "filter", 12.5, 13.0, 7, 1, (2, 3))
    assert bars["queue"] == Bar("queue", "", "queue", 10.0, 10.0, 7, 1, (2, 3))
    parts = [(bar.name, bar.begin, bar.end, bar.step) for bar in found if bar.kind == "part"]
    expected = [
        ("rollout", 10.0, 12.0, 1),
        ("scores", 12.0, 12.5, 1),
        ("filter", 12.5, 13.0, 1),
        ("wait", 13.0, 14.0, 1),
    ]
    assert parts == [*expected, ("train", 14.0, 15.0, 1)]
    assert bars["update"].versions == (3, 3)
    assert (bars["evaluation"].begin, bars["evaluation"].end) == (15.0, 16.0)  # after the newest step


def test_it_keeps_and_sends_a_bounded_number_of_spans() -> None:
    account, timeline, at = Account(), Timeline(), 0.0
    for step in range(25):
        groups = range(1000 * step, 1000 * step + 1000)
        done: Log = [(at + 1.0, completed(group, rollout_time_s=group % 1000 / 1000)) for group in groups]
        ready = batch(step, *((group, 1) for group in groups))
        told(account, timeline, [(at, issued(*groups)), *done, (at + 1.0, ready), (at + 2.0, trained(step))])
        at += 2.0
    assert KEPT_SPANS <= len(timeline.bars) < 2 * KEPT_SPANS
    assert len(timeline.groups) <= len(timeline.bars)
    window = timeline.window(0, 100)
    assert window.oldest > 1
    assert len(window.bars) == MAX_BARS
    assert window.left_out > 0
    kept = [bar for bar in window.bars if bar.group >= 0]
    assert min(bar.end - bar.begin for bar in kept) > 0.5  # the longest ones
    assert {bar.step for bar in window.bars if bar.kind == "part"} == set(range(window.first, window.last + 1))


def test_it_goes_on_from_a_snapshot_at_any_event() -> None:
    log, _ = steps(2)
    account, timeline = Account(), Timeline()
    told(account, timeline, log)
    for cut in range(len(log)):
        before, bars = Account(), Timeline()
        told(before, bars, log[:cut])
        before = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Account)
        half = told(before, msgspec.msgpack.decode(msgspec.msgpack.encode(bars), type=Timeline), log[cut:])
        assert (before, half) == (account, timeline)
