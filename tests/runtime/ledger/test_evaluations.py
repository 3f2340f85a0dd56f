"""What the ledger knows of an evaluation: its items, and what is kept for them."""

from typing import Any

import msgspec

from actors.buffer.deciding.decide import EvalPlan
from messages import (
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    GroupsClosed,
    Message,
    MessageDeadLettered,
)
from messages.subjects import filter_of
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.state import MAX_ENDINGS_LOST
from tests.build.samples import summary
from tests.support.ledger_log import Log, kinds, stored_log
from tests.support.rollout import announcement


def test_an_item_beyond_its_evaluation_set_is_not_counted() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=1),))
    log.announce(0)
    log.decide()
    for item in (3, 0):
        log.add(EvalCompleted(step=0, set="test", item=item, version=1, instance="r", samples=(summary(0, (1, 0)),)))
    assert kinds(log.decide()) == [EvalEnded]


def test_an_item_whose_task_nobody_can_read_ends_without_samples() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=2),))
    log.announce(0)
    log.decide()
    log.add(EvalCompleted(step=0, set="test", item=0, version=1, instance="r", samples=(summary(0, (1, 0)),)))
    for key in ("7.test.1", "0.other.1", "0.test.2", "0.test.x", "0.test"):
        log.add(MessageDeadLettered(subject=f"phy.r.work.eval.{key}", reason="no such field", dead_seq=1))
    assert kinds(log.decide()) == []
    log.add(MessageDeadLettered(subject="phy.r.work.eval.0.test.1", reason="no such field", dead_seq=1))
    (ended,) = log.decide()
    assert isinstance(ended, EvalEnded)
    assert ended.metrics == {"eval/test": 1.0, "eval/test-truncated_ratio": 0.0, "eval/test-ungraded_ratio": 0.5}


def ended_with(*rewards: float | None) -> dict[str, float]:
    """Metrics of an evaluation with one item, whose samples have these rewards; None: the grade failed."""
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=1),))
    log.announce(0)
    log.decide()
    samples = tuple(summary(index, reward=reward) for index, reward in enumerate(rewards))
    log.add(EvalCompleted(step=0, set="test", item=0, version=1, instance="r", samples=samples))
    (ended,) = log.decide()
    assert isinstance(ended, EvalEnded)
    return ended.metrics


def test_a_failed_grade_is_left_out_of_the_mean_and_counted_apart() -> None:
    metrics = ended_with(1.0, None, 0.0, 1.0)
    assert metrics["eval/test"] == 2 / 3  # not 2 / 4
    assert metrics["eval/test-ungraded_ratio"] == 1 / 4
    assert metrics["eval/test-pass@2"] == 1.0  # of three samples, two of which pass: 1 - C(1, 2) / C(3, 2)
    assert "eval/test-ungraded_ratio" not in ended_with(1.0, 0.0)


def test_an_evaluation_in_which_all_grades_failed_has_no_mean() -> None:
    assert ended_with(None, None) == {"eval/test-truncated_ratio": 0.0, "eval/test-ungraded_ratio": 1.0}


def test_an_evaluation_keeps_what_was_stored_since_it_was_issued() -> None:
    log = stored_log()
    issued = EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="s", num_items=1),), payload_seq=31)
    log.add(issued)
    for group_id in (0, 1):
        log.add(GroupsClosed(incarnation=1, group_ids=(group_id,), outcome="dropped", reason="r"))
    assert log.state.low_water() == 31
    log.state.newest_payload = 99
    assert log.state.low_water() == 31
    log.add(EvalEnded(incarnation=1, step=0, version=1, metrics={}))
    assert log.state.low_water() == 100


def test_an_item_whose_ending_stays_unreadable_ends_without_rewards() -> None:
    sets = (EvalSetSize(set="t", num_items=1),)
    state, events = LedgerState(), list[Message]([EvalIssued(incarnation=1, step=0, version=1, sets=sets)])
    subject = filter_of("run", EvalCompleted).replace(">", "0.t.0")
    events += [
        MessageDeadLettered(origin=f"event.{number}", subject=subject, reason="malformed", dead_seq=number)
        for number in range(1, MAX_ENDINGS_LOST + 1)
    ]
    done: list[bool] = []
    for seq, event in enumerate(events, start=1):
        fold(state, event, seq)
        assert state.evaluation is not None
        done.append(state.evaluation.complete)
    assert done == [False] * MAX_ENDINGS_LOST + [True]
    assert state.evaluation is not None
    assert state.evaluation.items["t"][0].rewards == ()


def test_samples_of_an_evaluation_s_weights_published_again_are_not_of_newer_ones() -> None:
    sets = (EvalSetSize(set="t", num_items=3),)
    events: list[Message] = [EvalIssued(incarnation=1, step=0, version=1, sets=sets)]
    for version, again_of in ((2, 1), (3, 1), (4, 0)):
        events.append(announcement(version, again_of=again_of))
    for item, version in enumerate((1, 3, 4)):
        sample = msgspec.structs.replace(summary(0, (1, 0)), last_version=version)
        events.append(EvalCompleted(step=0, set="t", item=item, version=1, instance="r", samples=(sample,)))
    state = LedgerState()
    for seq, event in enumerate(events, start=1):
        fold(state, event, seq)
    assert state.evaluation is not None
    items = state.evaluation.items["t"]
    assert [(item.num_newer, item.newest_version) for item in items.values()] == [(0, 0), (0, 0), (1, 4)]


def ended_set(*events: Message) -> EvalEnded:
    """The end of an evaluation of three prompts after these events."""
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=3),))
    log.announce(0)
    log.decide()
    for event in events:
        log.add(event)
    (ended,) = log.decide()
    assert isinstance(ended, EvalEnded)
    return ended


def answer(item: int, *rewards: float, failed: str = "") -> EvalCompleted:
    samples = tuple(summary(index, reward=reward) for index, reward in enumerate(rewards))
    what: dict[str, Any] = {"step": 0, "set": "test", "item": item, "version": 1, "instance": "r"}
    return EvalCompleted(**what, samples=samples, not_asked=not samples, failed=failed)


def test_prompts_that_an_evaluation_function_left_out_are_counted_and_no_samples_without_a_grade() -> None:
    ended = ended_set(answer(0), answer(1, 1.0, 0.0), answer(2))
    assert ended.metrics == {
        "eval/test-not_asked": 2,
        "eval/test": 0.5,
        "eval/test-truncated_ratio": 0.0,
        "eval/test-pass@1": 0.5,
        "eval/test-pass@2": 1.0,
    }
    assert (ended.not_asked, ended.failed) == ({"test": 2}, {})


def test_a_set_whose_evaluation_function_failed_has_no_result() -> None:
    """The answers so far would look like one. What a second run of the function says changes nothing."""
    ended = ended_set(answer(0, failed="KeyError()"), answer(0, 1.0), answer(1, 1.0), answer(2))
    assert (ended.metrics, ended.failed, ended.not_asked) == (
        {"eval/test-not_asked": 2},
        {"test": "KeyError()"},
        {"test": 2},
    )


def test_a_function_that_fails_when_it_runs_again_for_a_set_that_has_ended_takes_nothing_back() -> None:
    ended = ended_set(answer(0, 1.0), answer(1), answer(2), answer(0, failed="its rollout actor ended 5 times"))
    assert (ended.metrics["eval/test"], ended.failed) == (1.0, {})


def test_a_set_whose_task_nobody_can_read_ends_without_a_result() -> None:
    lost = [
        MessageDeadLettered(subject=f"phy.r.work.eval_set.{key}", reason="no such field", dead_seq=1)
        for key in ("7.test", "0.other", "0.test")
    ]
    ended = ended_set(answer(1, 1.0), *lost)
    assert (ended.metrics, ended.failed) == ({}, {"test": "its task cannot be decoded"})
