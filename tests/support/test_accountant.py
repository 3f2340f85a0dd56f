"""The accountant counts small logs as by hand, agrees with the ledger on whole runs, and finds planted faults."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest

from actors.buffer.deciding.decide import EvalPlan, Schedule
from messages import (
    BufferStarted,
    GroupRef,
    GroupsClosed,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
    TrainerStarted,
)
from runtime.ledger import batches, fold, groups, steps
from runtime.ledger.steps import Steps, Trainers
from tests.actors.buffer.test_whole_runs import played
from tests.build.events import aborted, batch, issued, saved, trained, verdict
from tests.model.test_model import SETUPS
from tests.model.world import Setup, act, actions, first, next_decision
from tests.support.accountant import Audit, audit
from tests.support.ledger_log import check_that_the_accountant_agrees
from tests.support.log_of_a_run import LOG, done

MAX_ACTIONS = 150  # of a walk through the states of a setup
WHO: dict[str, Any] = {"incarnation": 1, "start": "a"}


def numbered(log: Sequence[Message]) -> list[tuple[int, Message]]:
    return list(enumerate(log, start=1))


def count(log: Sequence[Message]) -> Audit:
    return audit((seq, msgspec.json.decode(msgspec.json.encode(event))) for seq, event in numbered(log))


def test_a_small_run_by_hand() -> None:
    found = count(LOG)
    assert found.complaints == []
    assert found.groups == {
        0: ("trained", 0, None),
        1: ("trained", 0, None),
        2: ("dropped", None, "zero_std"),
        3: ("trained", 1, None),
        4: ("failed", None, "no score"),
        5: ("trained", 1, None),
        6: ("dropped", None, "too_stale"),
        7: ("in flight", None, None),
    }
    assert found.steps == {0: [0, 1], 1: [3, 5]}
    assert found.books == {
        "issued": 8,
        "trained": 4,
        "skipped": 0,
        "dropped": 2,
        "failed": 1,
        "pooled": 0,
        "ready": 0,
        "in_flight": 1,
        "closes": True,
    }
    check_that_the_accountant_agrees(numbered(LOG))


def dead(subject: str, dead_seq: int = 1) -> MessageDeadLettered:
    return MessageDeadLettered(subject=f"phy.run.{subject}", reason="no JSON", dead_seq=dead_seq)


RARE: tuple[Message, ...] = (
    BufferStarted(incarnation=1),  # 1
    TrainerStarted(**WHO, step=0),
    issued(0, 1, 2, 3),
    done(0),
    done(1),
    verdict(0, 4),  # 6
    verdict(1, 5),
    batch(0, (0, 4), num_events=2),
    batch(0, (1, 5), num_events=2, index=1),
    trained(0, start="a", skipped_groups=(1,)),
    PayloadsMissing(**WHO, step=0, groups=(GroupRef(group_id=0, attempt=0, event_seq=4),), reason="late"),  # 11
    done(2),
    BufferStarted(incarnation=2, verdicts=False),  # keeps group 2
    issued(4),  # of the first buffer
    done(3),
    batch(1, (2, 12), num_events=2, incarnation=2),  # 16, and its buffer dies
    BufferStarted(incarnation=3, verdicts=False),
    batch(1, (2, 12), (3, 15), incarnation=3),
    trained(1, start="a"),
    issued(4, 5, 6, 7, incarnation=3, num_samples=2, verdicts=False),
    done(4),  # 21: one sample
    dead("event.group.completed.5.0", 1),
    dead("event.group.completed.5.0", 2),
    dead("event.group.aborted.5.0", 3),
    dead("work.rollout.6.0"),
    aborted(7, samples=()),  # 26
    issued(7, attempt=1, incarnation=3, num_samples=2, verdicts=False),
    aborted(7, samples=()),  # stored again
)


TAKEN_BACK: tuple[Message, ...] = (
    BufferStarted(incarnation=1),  # 1
    TrainerStarted(**WHO, step=0),
    issued(0, 1, 2, 3),
    done(0),
    done(1),
    done(2),  # 6
    done(3),
    verdict(0, 4),
    verdict(0, 4, Outcome.DROP),  # of a second filter
    verdict(1, 5),
    verdict(2, 6, Outcome.SPARE),  # 11
    verdict(3, 7),
    batch(0, (0, 4), (1, 5), passed_over=(3,)),
    PayloadsMissing(**WHO, step=0, groups=(GroupRef(group_id=0, attempt=0, event_seq=4),), reason="purged"),
    batch(0, (0, 4), (1, 5), passed_over=(3,)),  # stored again
    issued(0, 1, 2, 3),  # 16, the same
    issued(0, attempt=1),
    done(0, attempt=1),
    verdict(0, 4),  # the same
    verdict(0, 18, attempt=1),
    batch(0, (1, 5), (0, 1, 18)),  # 21
    GroupsClosed(incarnation=1, group_ids=(2, 3), outcome="dropped", reason="surplus"),
    trained(0, start="a"),
    issued(4),
    done(4),
    verdict(4, 25),  # 26
    batch(1, (4, 25)),
    saved(1, oldest=1, start="a"),
)


def test_a_batch_that_is_taken_back_by_hand() -> None:
    states = {
        13: ["batched", "batched", "passed over", "passed over"],
        14: ["pooled", "ready", "passed over", "passed over"],
        16: ["pooled", "ready", "passed over", "passed over"],
        19: ["completed", "ready", "passed over", "passed over"],
        21: ["batched", "batched", "passed over", "passed over"],
        28: ["trained", "trained", "dropped", "dropped", "batched"],
    }
    for num_events, expected in states.items():
        found = count(TAKEN_BACK[:num_events])
        assert found.complaints == []
        assert [state for state, _, _ in found.groups.values()] == expected
        check_that_the_accountant_agrees(numbered(TAKEN_BACK[:num_events]))


def test_a_log_of_rare_events_by_hand() -> None:
    found = count(RARE)
    assert found.complaints == []
    assert found.groups == {
        0: ("trained", 0, None),
        1: ("skipped", 0, None),
        2: ("trained", 1, None),
        3: ("trained", 1, None),
        4: ("failed", None, "1 samples where 2 were asked for"),
        5: ("failed", None, "ending: no JSON"),
        6: ("failed", None, "task: no JSON"),
        7: ("in flight", None, None),
    }
    check_that_the_accountant_agrees(numbered(RARE))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (batch(2, (7, 26), incarnation=3), "names group 7, which is in flight"),
        (batch(2, (0, 4), incarnation=3), "names group 0, which is trained"),
        (batch(1, (7, 26), incarnation=3), "a batch of step 1, which has one since 18"),
        (issued(7, attempt=2, incarnation=3), "it is not pooled but in flight"),
        (issued(9, incarnation=3), "not the next one, which is 8"),
    ],
)
def test_what_a_correct_buffer_would_not_write_is_a_complaint(wrong: Message, complaint: str) -> None:
    found = count((*RARE, wrong)).complaints
    assert any(complaint in each for each in found)


def walked(setup: Setup, seed: int) -> list[Message]:
    """Return the log of a walk by chance through the states that the model explores."""
    random, (world, log) = Random(seed), first(setup)
    for _ in range(MAX_ACTIONS):
        possible = list(actions(world, decides=next_decision(world, setup) is not None))
        if not possible or world.state.finished is not None or world.state.gave_up is not None:
            break
        log += act(world, setup, random.choice(possible))
    return log


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_walks_through_the_model_are_counted_alike(setup: Setup) -> None:
    for seed in range(4):
        check_that_the_accountant_agrees(numbered(walked(setup, seed)))


@cache
def logs() -> tuple[list[tuple[int, Message]], ...]:
    """Logs in which nothing is wrong: by hand, by chance, and of the model."""
    evals = (EvalPlan(name="e", interval=3, num_items=1, skip_before_train=True),)
    found: list[Sequence[Message]] = [log[:end] for log in (RARE, TAKEN_BACK) for end in range(4, len(log) + 1)]
    for seed in range(12):
        spares = bool(seed % 3)
        schedule = Schedule(
            num_steps=4,
            rollout_batch_size=2,
            over_sampling_batch_size=4,
            max_staleness=seed % 2,
            keep_when_insufficient=spares,
            max_barren_groups=20 if spares else 1024,
            over_sampling_filter="sort_by_reward_std" if seed % 4 == 0 else None,
            evals=evals,
        )
        found.append(played(schedule, seed, save_interval=2).log)
    found += [walked(setup, seed) for setup in SETUPS for seed in range(2)]
    return tuple(map(numbered, found))


def planted(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Change the text of a function of the ledger, wherever that is imported."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, source
    module, made = sys.modules[function.__module__], dict[str, Any]()
    exec("from __future__ import annotations\n" + source.replace(old, new), module.__dict__, made)
    name, changed = function.__name__, made[function.__name__]
    for place in (Trainers, Steps, fold, groups, batches, steps):
        if vars(place).get(name) is function:
            monkeypatch.setattr(place, name, changed)


FAULTS = [
    (Trainers.is_replaced, "event.start in self.trainer_starts[:-1]", "False"),
    (Trainers.is_replaced, "event.incarnation < self.trainer_incarnation", "False"),
    (Steps.gather, "event.index + 1 < event.num_events", "False"),
    (Steps.takes_batch, "not any(ref.event_seq in lost for ref in event.groups)", "True"),
    (steps.advance, "step < event.step", "step <= event.step"),
    (steps.advance, "step < event.oldest_step", "step <= event.oldest_step"),
    (groups.end_attempt, "group.attempt != event.attempt or ", ""),
    (groups.end_attempt, "or group.stage is not IN_FLIGHT", ""),
    (groups.end_attempt, "completed and not state.verdicts", "completed"),
    (groups.wrong_count, "got != num_samples", "got > num_samples"),
    (groups.judge, "group.stage is not COMPLETED or ", ""),
    (groups.judge, "or group.event_seq != event.event_seq", ""),
    (groups.close, "tally.get(reason, 0) + 1", "1"),
    (groups.set_verdicts, "() if needed else", "() if not needed else"),
    (groups.issue, "issued.attempt > group.attempt", "issued.attempt >= group.attempt"),
    (groups.issue, "issued.group_id >= state.next_group and ", ""),
    (batches._pass_over, "in_log_order(state.in_stage(Stage.SPARE).values())", "[]"),
    (batches._pass_over, "event.passed_over", "()"),
    (batches._give_back, "ref in change.lost", "True"),
    (batches._settle, "ref.group_id in change.skipped", "False"),
    (fold._apply, "event.incarnation < state.incarnation", "False"),
    (fold._lose, ">= MAX_ENDINGS_LOST", "> MAX_ENDINGS_LOST"),
    (fold._lose, "task is not None", "False"),
]


@pytest.mark.parametrize(("function", "old", "new"), FAULTS)
def test_a_fault_of_the_fold_is_a_disagreement(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str
) -> None:
    unharmed = logs()
    compare_all(unharmed[:1])
    planted(monkeypatch, function, old, new)
    with pytest.raises((AssertionError, KeyError)):
        compare_all(unharmed)


def compare_all(logs: Sequence[list[tuple[int, Message]]]) -> None:
    for log in logs:
        check_that_the_accountant_agrees(log)
