"""The ledger of a run without a filter, and of one whose filter is added or removed."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from messages import (
    BatchReady,
    BufferStarted,
    GroupsIssued,
    Message,
    Outcome,
)
from runtime.ledger.changes import AttemptEnded, Judged
from runtime.ledger.fold import LedgerState, Stage, fold
from tests.build.events import aborted, completed, failed, verdict
from tests.support.ledger_log import Log


def unfiltered(**settings: Any) -> Log:
    """A log of a run without a filter, with the groups of its first round in flight."""
    log = Log(**settings)
    log.add(BufferStarted(incarnation=1, verdicts=False))
    log.announce(0)
    log.decide()
    return log


def test_without_a_filter_a_completed_group_is_kept_at_once() -> None:
    log = unfiltered()
    (issue,) = [event for event in log.events if isinstance(event, GroupsIssued)]
    assert (issue.verdicts, log.state.verdicts) == (False, False)
    event = completed(0, 0)
    ended, kept = fold(log.state, event, len(log.events) + 1)
    assert (ended, kept) == (AttemptEnded(log.state.groups[0], event), Judged(log.state.groups[0], Outcome.KEEP, None))
    assert log.state.groups[0].stage is Stage.READY


def test_without_a_filter_a_verdict_changes_nothing() -> None:
    log = unfiltered()
    seq = log.add(completed(0, 0))
    before = msgspec.json.encode(log.state.groups)
    log.add(verdict(0, seq, Outcome.DROP))
    assert msgspec.json.encode(log.state.groups) == before


def test_without_a_filter_groups_still_fail_and_are_still_generated_again() -> None:
    log = unfiltered(num_samples=2, rollout_batch_size=3, over_sampling_batch_size=3)
    log.add(completed(0, 0))  # one sample of two
    log.add(aborted(1, 0))
    assert (0 in log.state.groups, log.state.groups[1].stage) == (False, Stage.POOLED)
    assert log.state.failed == {"1 samples where 2 were asked for": 1}


def test_a_filter_that_is_added_judges_what_completes_from_then_on() -> None:
    log = unfiltered(rollout_batch_size=3, over_sampling_batch_size=3)
    log.add(completed(0, 0))
    log.add(BufferStarted(incarnation=2))
    seq = log.add(completed(1, 0))
    assert [log.state.groups[group_id].stage for group_id in (0, 1)] == [Stage.READY, Stage.COMPLETED]
    log.add(verdict(1, seq, Outcome.DROP, reason="dull"))
    assert log.state.dropped == {"dull": 1}
    log.decide()
    (_, again) = [event for event in log.events if isinstance(event, GroupsIssued)]
    assert again.verdicts


def test_a_filter_that_is_removed_leaves_no_group_without_a_verdict() -> None:
    """As in a log of a version that judged every group: its groups without a verdict are kept by the next buffer."""
    log = Log(rollout_batch_size=3, over_sampling_batch_size=3)
    log.add(BufferStarted(incarnation=1))
    log.announce(0)
    log.decide()
    log.complete(0, outcome=Outcome.DROP)
    log.add(completed(1, 0))
    assert log.state.groups[1].stage is Stage.COMPLETED
    kept = fold(log.state, BufferStarted(incarnation=2, verdicts=False), len(log.events) + 1)
    assert kept == (Judged(log.state.groups[1], Outcome.KEEP, None),)
    assert (log.state.groups[1].stage, log.state.dropped) == (Stage.READY, {"filter_drop": 1})
    assert log.state.books().closed


def test_a_reader_that_starts_in_the_middle_learns_it_from_the_issue() -> None:
    log = unfiltered()
    state = LedgerState()
    for seq, event in enumerate([*log.events, completed(0, 0), completed(1, 0)], start=1):
        if not isinstance(event, BufferStarted):  # it is archived by now
            fold(state, event, seq)
    assert [group.stage for group in state.groups.values()] == [Stage.READY, Stage.READY]


ENDINGS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["complete", "abort", "fail", "train"])), max_size=40)


@given(endings=ENDINGS, size=st.integers(1, 3), extra=st.integers(0, 2))
def test_without_verdicts_a_run_goes_as_with_a_filter_that_keeps_every_group(
    endings: list[tuple[int, str]], size: int, extra: int
) -> None:
    """The same endings in the same order: the same groups are issued, batched, trained and given up."""
    told = [played_with(endings, verdicts, size, size + extra) for verdicts in (True, False)]
    assert told[0] == told[1]


def played_with(endings: list[tuple[int, str]], verdicts: bool, size: int, refill: int) -> list[object]:
    """A run under a filter that keeps all, or without one: what it decided, and its groups and counts at the end."""
    log = Log(num_steps=6, rollout_batch_size=size, over_sampling_batch_size=refill)
    log.add(BufferStarted(incarnation=1, verdicts=verdicts))
    log.announce(0)
    decided = log.decide()
    for pick, ending in endings:
        running = list(log.state.in_stage(Stage.IN_FLIGHT).values())
        waiting = [step for step, batch in log.state.batches.items() if not batch.trained]
        if ending == "train" and waiting:
            log.train(waiting[0])
        elif ending != "train" and running:
            group = running[pick % len(running)]
            end_of = {"complete": completed, "abort": aborted, "fail": failed}[ending]
            seq = log.add(end_of(group.group_id, attempt=group.attempt))
            if verdicts and ending == "complete":
                log.add(verdict(group.group_id, seq, attempt=group.attempt))
        decided += log.decide()
    stages = [(group.group_id, group.attempt, group.stage) for group in log.state.groups.values()]
    return [[what_of(event) for event in decided], stages, log.state.books(), log.state.barren]


def what_of(event: Message) -> object:
    """A decision without what differs between the two logs: their sequences, and whether verdicts are needed."""
    match event:
        case BatchReady():
            return "batch", event.step, [(ref.group_id, ref.attempt) for ref in event.groups]
        case GroupsIssued():
            return msgspec.structs.replace(event, verdicts=True)
        case _:
            return event
