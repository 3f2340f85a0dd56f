"""What Prometheus gets of a run: the ledger's numbers, labels that are bounded, and a text in both formats."""

import math
import re

from actors.observer.exposition import COUNTER, GAUGE, MAX_REASONS, Family, families_of, rendered
from actors.observer.observed import Observed
from messages import ActorStarted, EngineLoad, EventLoopBlocked, LastSample, Message
from tests.build.events import completed, failed, issued
from tests.support.log_of_a_run import LOG

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def observed_of(*events: Message) -> Observed:
    observed = Observed("r", 2)
    for seq, event in enumerate(events, 1):
        observed.apply(event, seq, 1000.0 + seq)
    return observed


def series(observed: Observed) -> Series:
    return {
        (family.name, frozenset(labels.items())): value
        for family in families_of(observed)
        for labels, value in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_the_numbers_of_a_run_by_hand() -> None:
    """Of eight groups four are trained, 2 is dropped by its verdict, 6 by the buffer, 4 fails, 7 is in flight."""
    found = series(observed_of(*LOG))
    states = {name: value(found, "groups", state=name) for name in ("trained", "dropped", "failed", "in_flight")}
    assert states == {"trained": 4, "dropped": 2, "failed": 1, "in_flight": 1}
    assert value(found, "groups_issued") == 8
    assert value(found, "groups_lost", outcome="dropped", reason="zero_std") == 1
    assert value(found, "groups_lost", outcome="dropped", reason="too_stale") == 1
    assert value(found, "groups_lost", outcome="failed", reason="other") == 1  # "no score" is no code
    assert value(found, "train_steps") == 2
    assert value(found, "groups_completed") == 6
    assert value(found, "samples", status="completed") == 6
    assert value(found, "step_metric", metric="train/num_tokens") == 9
    assert value(found, "step_metric", metric="rollout/raw_reward") == 0.5
    assert (value(found, "checkpoints"), value(found, "checkpoint_step")) == (1, 2)
    assert value(found, "weights_version", place="announced") == 3
    assert value(found, "run_state", state="running") == 1
    assert value(found, "last_event_timestamp_seconds") == 1000 + len(LOG)


def test_the_load_of_an_engine() -> None:
    load = EngineLoad(samples=6, running=5, waiting=2, cache_usage=0.45)
    found = series(observed_of(completed(0, last_sample=LastSample(engine="engine.policy.0", load=load))))
    names = ("samples", "running_requests", "waiting_requests", "cache_usage")
    engine = {"engine": "engine.policy.0", "pool": "policy"}
    assert [value(found, f"engine_{name}", **engine) for name in names] == [6, 5, 2, 0.45]


def test_restarts_are_counted_over_several_starts_of_the_run() -> None:
    pids = iter(range(10))
    starts = [
        ActorStarted(actor="trainer", node=node, pid=next(pids), restarts=restarts)
        for node, restarts in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 0), ("a", 1))
    ]
    observed = observed_of(*starts)
    assert value(series(observed), "process_restarts", process="trainer", node="a") == 3
    assert value(series(observed), "process_up", process="trainer", node="a") == 1


def test_the_time_in_which_event_loops_were_blocked_is_counted_once_by_process() -> None:
    started = ActorStarted(actor="rollout", node="a", pid=1)
    blocks = [
        EventLoopBlocked(actor="rollout", node="a", pid=1, blocked_s=seconds, ended=ended)
        for seconds, ended in ((5.0, False), (9.0, True), (1.5, True))
    ]
    found = series(observed_of(started, *blocks))
    assert value(found, "event_loop_blocked_seconds", process="rollout", node="a") == 10.5


def test_reasons_are_codes_without_numbers_and_few() -> None:
    texts = (
        *("zero_std_0.5", "zero_std_-1.0", "reward: the judge at 10.0.0.1 refused", "task: no prompt"),
        *("group 17 is bad", "user's secret", "Traceback (most recent call last)", "", "ünicode"),
        *(f"r{chr(97 + number)}" for number in range(26)),
    )
    groups = range(len(texts))
    events = [issued(*groups), *(failed(group, text) for group, text in zip(groups, texts, strict=True))]
    found = {
        dict(labels)["reason"]: number
        for (name, labels), number in series(observed_of(*events)).items()
        if name == "groups_lost" and dict(labels)["outcome"] == "failed"
    }
    assert found["zero_std"] == 2
    assert (found["reward"], found["task"]) == (1, 1)
    assert all(re.fullmatch("[a-z_]+", reason) for reason in found)
    assert len(found) == MAX_REASONS + 1
    assert sum(found.values()) == len(texts)


def test_a_fold_that_goes_on_from_a_snapshot_gives_the_same_numbers() -> None:
    once, in_parts = observed_of(*LOG), Observed("r", 2)
    for seq, event in enumerate(LOG, 1):
        in_parts = Observed.decoded(in_parts.encoded())
        in_parts.apply(event, seq, 1000.0 + seq)
        assert list(families_of(in_parts))
    assert series(once) == series(in_parts)


def test_the_text_by_hand() -> None:
    given = [
        Family("steps", COUNTER, "Steps.", [({}, 2)]),
        Family("odd", GAUGE, "Odd.", [({"at": 'a"b\\c\nd'}, math.nan), ({"at": "é"}, -math.inf)]),
    ]
    odd = r"""# TYPE physarum_odd gauge
physarum_odd{run="r",at="a\"b\\c\nd"} NaN
physarum_odd{run="r",at="é"} -Inf
"""
    assert rendered(given, {"run": "r"}, openmetrics=True) == (
        f"# HELP physarum_steps Steps.\n# TYPE physarum_steps counter\n"
        f'physarum_steps_total{{run="r"}} 2.0\n# HELP physarum_odd Odd.\n{odd}# EOF\n'
    )
    assert rendered(given, {"run": "r"}, openmetrics=False) == (
        f"# HELP physarum_steps_total Steps.\n# TYPE physarum_steps_total counter\n"
        f'physarum_steps_total{{run="r"}} 2.0\n# HELP physarum_odd Odd.\n{odd}'
    )
