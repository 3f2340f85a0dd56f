"""Spans of groups and steps from the log alone, by hand."""

import pytest
from msgspec.structs import replace

from actors.observer.traces import OtlpSpan, traced
from messages import GroupCompleted, LastSample, Message, Outcome
from runtime.report.fold.account import Account
from runtime.report.fold.spans import Span
from tests.build.events import batch, completed, failed, issued, trained, verdict
from tests.support.log_of_a_run import LOG, SAMPLE


def spans_of(*events: tuple[float, Message]) -> list[OtlpSpan]:
    account, spans = Account(reads_facts=True), list[Span]()
    for time, event in events:
        account.apply(event, time, spans)
    return [span for span in map(traced, spans) if span is not None]


def graded(group_id: int) -> GroupCompleted:
    last = LastSample(queue_time_s=1.0, engine="engine.policy.0", grader="exact")
    return completed(group_id, samples=(SAMPLE,), rollout_time_s=5.0, reward_time_s=2.0, last_sample=last)


def test_the_life_of_a_trained_group_and_its_step_by_hand() -> None:
    """Issued at 100. A task of 5 s, of which 1 s is queue, ends at 108; the scores end at 110."""
    times = {
        "perf/train_wait_time": 14.0,
        "perf/fetch_time": 1.0,
        "perf/train_time": 3.0,
        "perf/update_weights_time": 2.0,
    }
    found = spans_of(
        (100.0, issued(7)),
        (110.0, graded(7)),
        (111.0, verdict(7, 2)),
        (114.0, batch(0, (7, 2))),
        (120.0, trained(0, metrics=times, num_groups=1, num_samples=1, num_tokens=9)),
    )
    group = {span.name: (span.begin, span.end) for span in found if span.root == "group/7"}
    assert group == {
        "prompt group": (100, 120),
        "queue": (100, 104),
        "rollout": (104, 108),
        "scores": (108, 110),
        "filter": (110, 111),
        "wait for the batch": (111, 114),
        "wait for the step": (114, 120),
    }
    step = {span.name: (span.begin, span.end) for span in found if span.root == "step/1"}
    assert step == {
        "train step": (100, 120),
        "queue": (100, 104),
        "rollout": (104, 108),
        "scores": (108, 110),
        "filter": (110, 111),
        "wait": (111, 114),
        "fetch": (114, 115),
        "train": (115, 118),
        "weights": (118, 120),
    }
    (root,) = [span for span in found if span.name == "prompt group"]
    assert (root.link, root.error) == ("step/1", "")
    assert root.attributes == {
        "physarum.group": 7,
        "physarum.attempts": 1,
        "physarum.outcome": "trained",
        "physarum.samples": 1,
        "physarum.response_tokens": SAMPLE.response_len,
        "physarum.reward": 0.5,
        "physarum.step": 1,
    }
    assert next(span.attributes["physarum.engine"] for span in found if span.name == "rollout") == "engine.policy.0"
    assert len({span.key for span in found}) == len(found)
    assert {span.parent for span in found} == {"", "group/7", "step/1"}


@pytest.mark.parametrize(
    ("end", "outcome", "error"),
    [
        (failed(1, "no score"), "failed", "no score"),
        (verdict(1, 2, Outcome.DROP, reason="zero_std"), "dropped", ""),
        (verdict(1, 2, Outcome.FAILED, reason="it raised"), "failed", "it raised"),
    ],
)
def test_a_group_that_is_not_trained_has_no_link_and_its_reason(end: Message, outcome: str, error: str) -> None:
    before = [] if isinstance(end, type(failed(1, ""))) else [(1.0, graded(1))]
    found = spans_of((0.0, issued(1)), *before, (3.0, end), (4.0, end))
    (root,) = [span for span in found if not span.parent]
    assert (root.attributes["physarum.outcome"], root.error, root.link, root.end) == (outcome, error, "", 3.0)
    assert root.attributes["physarum.reason"]


def test_a_batch_of_several_events_ends_all_of_its_groups() -> None:
    parts = [replace(batch(0, (number, 2)), index=number, num_events=2) for number in range(2)]
    begin = [(0.0, issued(0, 1)), (1.0, graded(0)), (1.0, graded(1)), (2.0, verdict(0, 2)), (2.0, verdict(1, 3))]
    found = spans_of(*begin, (3.0, parts[0]), (3.0, parts[1]), (4.0, trained(0)))
    assert [span.link for span in found if span.name == "prompt group"] == ["step/1", "step/1"]


def test_every_group_of_a_log_that_ended_has_one_root() -> None:
    """Group 3 is halted and issued again; the trainer dies before it says that step 1 is trained."""
    found = spans_of(*((1000.0 + seq, event) for seq, event in enumerate(LOG)))
    roots = {span.key: span for span in found if not span.parent}
    outcomes = {key: span.attributes.get("physarum.outcome") for key, span in roots.items()}
    assert outcomes == {
        **{f"group/{number}": "trained" for number in (0, 1, 3, 5)},
        **{f"group/{number}": "dropped" for number in (2, 6)},
        **{"group/4": "failed", "step/1": None},
    }
    assert roots["group/0"].link == "step/1"
    assert (roots["group/3"].link, roots["group/3"].attributes["physarum.step"]) == ("", 2)
    assert roots["group/3"].attributes["physarum.attempts"] == 2
    assert [span.name for span in found if span.parent == "group/3"][:2] == ["halted", "queue"]
    assert all(span.begin <= span.end for span in found)
    assert all(roots[span.root].begin <= span.begin <= span.end <= roots[span.root].end for span in found)
