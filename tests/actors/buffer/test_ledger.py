"""What is decided on a ledger, and that its books close whatever happens to the log."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.buffer.deciding.decide import POOLED_ROUNDS, EvalPlan, decide, halt_by_hand
from messages import (
    BatchReady,
    BufferStarted,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    RoundHalted,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SnapshotTaken,
)
from runtime.ledger.fold import Group, LedgerState, Stage, fold
from tests.build.events import aborted, saved, trained
from tests.build.samples import summary
from tests.support.ledger_log import Log, kinds


def test_nothing_is_issued_before_weights_are_announced() -> None:
    log = Log()
    assert log.decide() == []
    log.announce(0)
    (issued,) = log.decide()
    assert isinstance(issued, GroupsIssued)
    assert [group.group_id for group in issued.groups] == [0, 1]
    assert issued.min_version == 1


def test_a_batch_is_made_of_kept_groups_in_order_of_issue() -> None:
    log = Log(rollout_batch_size=2, over_sampling_batch_size=3)
    log.announce(0)
    log.decide()
    log.complete(2)
    log.complete(0)
    batch, halt = log.decide()
    assert isinstance(batch, BatchReady)
    assert [ref.group_id for ref in batch.groups] == [0, 2]
    assert isinstance(halt, RoundHalted)
    assert halt.round == 0
    assert log.state.books().closed


def test_the_next_round_waits_for_the_weights_of_this_one() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    assert kinds(log.decide()) == [BatchReady]
    log.add(trained(0))
    assert log.decide() == []
    log.announce(1)
    assert kinds(log.decide()) == [GroupsIssued]


def test_one_step_of_staleness_issues_before_the_weights_arrive() -> None:
    log = Log(max_staleness=1)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    assert kinds(log.decide()) == [BatchReady, GroupsIssued]


def test_a_rejected_group_is_counted_and_replaced() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    log.complete(0, outcome=Outcome.DROP)
    (refill,) = log.decide()
    assert isinstance(refill, GroupsIssued)
    assert [group.group_id for group in refill.groups] == [2, 3]
    assert log.state.books().dropped == 1
    assert log.state.books().closed


def test_an_aborted_group_is_pooled_and_issued_again_with_what_it_had() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=2)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.decide()
    log.add(aborted(1, 0, payload=7))
    assert log.state.books().pooled == 1
    log.train(0)
    (issued,) = log.decide()
    assert isinstance(issued, GroupsIssued)
    assert [(group.group_id, group.attempt) for group in issued.groups] == [(1, 1), (2, 0)]
    assert log.state.groups[1].carried[0].segments[0].seq == 7


def halted_log(**settings: Any) -> Log:
    """Of three groups one is kept; a person halts the round of the other two, twice, of which one counts."""
    log = Log(rollout_batch_size=2, over_sampling_batch_size=3, **settings)
    assert halt_by_hand(log.state) is None
    log.announce(0)
    log.decide()
    log.complete(0)
    halt = halt_by_hand(log.state)
    assert halt == RoundHalted(incarnation=0, round=0, by_hand=True)
    log.add(halt)
    assert halt_by_hand(log.state) is None
    return log


def test_a_round_that_a_person_halted_goes_on_with_its_groups_before_new_ones_begin() -> None:
    log = halted_log(max_attempts=1)
    log.add(aborted(2, 0, payload=7))
    assert log.decide() == []  # group 1 ends first
    log.add(aborted(1, 0, samples=()))  # it had no engine: it is not given up, although max_attempts is 1
    (issued,) = log.decide()
    assert isinstance(issued, GroupsIssued)
    assert (issued.round, [(group.group_id, group.attempt) for group in issued.groups]) == (1, [(1, 1), (2, 1), (3, 0)])
    assert log.state.groups[2].carried[0].segments[0].seq == 7
    assert (log.state.books().pooled, log.state.books().dropped, log.state.books().closed) == (0, 0, True)


def test_the_batch_after_a_halt_by_hand_takes_groups_of_both_rounds_and_ends_them() -> None:
    log = halted_log(on_surplus="drop")
    log.add(aborted(1, 0))
    log.add(aborted(2, 0))
    log.decide()
    log.complete(1)
    batch, halt = log.decide()
    assert isinstance(batch, BatchReady)
    assert (batch.step, [ref.group_id for ref in batch.groups]) == (0, [0, 1])
    assert halt == RoundHalted(incarnation=0, round=1)
    log.add(aborted(2, 1))
    log.complete(3)
    log.train(0)
    closed, issued = log.decide()
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.reason) == ((3,), "surplus")
    assert isinstance(issued, GroupsIssued)
    assert (issued.round, issued.groups[0].group_id, issued.groups[0].attempt) == (2, 2, 2)


def test_what_halts_by_hand_drop_never_ends_the_run() -> None:
    log = Log(rollout_batch_size=4, over_sampling_batch_size=4, on_halt="drop", max_barren_groups=8)
    log.announce(0)
    log.decide()
    for _ in range(3):
        halt = halt_by_hand(log.state)
        assert halt is not None
        log.add(halt)
        for group_id in list(log.state.groups):
            log.add(aborted(group_id, 0))
        assert kinds(log.decide()) == [GroupsClosed, GroupsIssued]
    assert (log.state.dropped, log.state.barren) == ({"halted": 12}, 0)


@pytest.mark.parametrize("halts", [True, False])
def test_a_halt_by_hand_before_the_next_round_begins_ends_the_earlier_one(halts: bool) -> None:
    log = Log(rollout_batch_size=2, over_sampling_batch_size=6, halts=halts)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    halt = halt_by_hand(log.state)
    assert halt == (None if halts else RoundHalted(incarnation=0, round=0))
    if halt is not None:
        log.add(halt)
    assert (log.state.open_round, log.state.rounds_ahead) == (1, 0)


@pytest.mark.parametrize("halts_before", [0, 30])
def test_a_group_stays_in_the_pool_as_long_after_halts_by_hand(halts_before: int) -> None:
    log = Log(num_steps=100)
    log.state.rounds_ahead = log.state.rounds_ahead_before = halts_before
    for group_id, age in enumerate((POOLED_ROUNDS, POOLED_ROUNDS + 1)):
        began = 40 - age + halts_before
        pooled = Group(
            group_id=group_id, attempt=0, prompt=0, round=began, min_version=1, stage=Stage.POOLED, payload_seq=1
        )
        log.state.enter(pooled)
    log.state.version, log.state.round = 1, 40
    closed = decide(log.state, log.schedule)
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.reason) == ((1,), "left_in_pool")


def test_aborted_groups_are_closed_when_the_recipe_drops_them() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=2, on_halt="drop")
    log.announce(0)
    log.decide()
    log.complete(0)
    log.decide()
    log.add(aborted(1, 0))
    log.decide()
    assert log.state.dropped == {"halted": 1}
    assert log.state.books().closed


def test_a_surplus_group_is_trained_in_the_next_batch() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=2)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    (batch,) = log.decide()
    assert isinstance(batch, BatchReady)
    assert [ref.group_id for ref in batch.groups] == [0]
    log.train(0)
    (batch,) = log.decide()
    assert isinstance(batch, BatchReady)
    assert [ref.group_id for ref in batch.groups] == [1]


def test_an_evaluation_is_issued_on_its_interval_and_ended_with_its_means() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=2, num_items=2),))
    log.announce(0)
    issued, _ = log.decide()
    assert isinstance(issued, EvalIssued)
    for item, reward in ((0, 1.0), (1, 0.0), (1, 1.0)):  # the third is a duplicate
        log.add(
            EvalCompleted(
                step=0,
                set="test",
                item=item,
                version=1,
                instance="rollout",
                samples=(summary(0, (1, 0), reward=reward),),
            )
        )
    (ended,) = log.decide()
    assert isinstance(ended, EvalEnded)
    assert ended.metrics == {"eval/test": 0.5, "eval/test-truncated_ratio": 0.0}
    assert log.state.books().closed


def test_an_evaluation_that_newer_weights_ended_says_how_much_of_it_is_theirs() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=2, num_items=4), EvalPlan(name="other", interval=2, num_items=1)))
    log.announce(0)
    log.decide()
    answers = ((1, 1), (1, 3), (2, 2), (None, None))  # oldest and newest version of each sample
    for item, (first, last) in enumerate(answers):
        sample = msgspec.structs.replace(summary(0, (1, 0)), first_version=first, last_version=last)
        log.add(EvalCompleted(step=0, set="test", item=item, version=1, instance="rollout", samples=(sample,)))
    sample = msgspec.structs.replace(summary(0, (1, 0)), first_version=1, last_version=1)
    log.add(EvalCompleted(step=0, set="other", item=0, version=1, instance="rollout", samples=(sample,)))
    (ended,) = log.decide()
    assert isinstance(ended, EvalEnded)
    assert (ended.version, ended.newest_version) == (1, 3)
    assert ended.metrics["eval/test-newer_weights_ratio"] == 0.5
    assert "eval/other-newer_weights_ratio" not in ended.metrics


def test_a_batch_waits_for_the_evaluation_of_its_weights() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=1),))
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    assert log.decide() == []
    log.add(EvalCompleted(step=0, set="test", item=0, version=1, instance="r", samples=(summary(0, (1, 0)),)))
    assert kinds(log.decide()) == [EvalEnded, BatchReady]


def test_the_run_finishes_after_its_last_step_is_saved_announced_and_evaluated() -> None:
    log = Log(num_steps=1, evals=(EvalPlan(name="test", interval=5, num_items=1, skip_before_train=True),))
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    log.train(0)
    assert kinds(log.decide()) == [EvalIssued]
    log.add(EvalCompleted(step=1, set="test", item=0, version=2, instance="r", samples=(summary(0, (1, 0)),)))
    assert kinds(log.decide()) == [EvalEnded]
    log.add(saved(1, oldest=1))
    assert kinds(log.decide()) == [SnapshotTaken, RunFinished]
    assert log.state.books().trained == 2


def finished_after_one_step() -> Log:
    log = Log(num_steps=1, over_sampling_batch_size=3)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    log.add(aborted(2, 0))
    log.train(0)
    log.add(saved(1, oldest=1))
    assert RunFinished in kinds(log.decide())
    return log


def test_a_run_does_not_finish_while_groups_are_in_flight() -> None:
    """All is trained, saved and announced; a group that no batch needs has not ended yet."""
    log = Log(num_steps=1, over_sampling_batch_size=3)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    log.train(0)
    log.add(saved(1, oldest=1))
    assert log.state.books().in_flight == 1
    assert RunFinished not in kinds(log.decide())
    log.add(aborted(2, samples=()))
    assert RunFinished in kinds(log.decide())


def test_a_finished_run_is_finished_again_for_the_next_buffer() -> None:
    log = finished_after_one_step()
    assert log.decide() == []
    log.add(BufferStarted(incarnation=2))
    assert kinds(log.decide()) == [RunFinished]


def test_a_finished_run_goes_on_when_more_steps_are_asked_for() -> None:
    log = finished_after_one_step()
    log.schedule = msgspec.structs.replace(log.schedule, num_steps=2)
    log.add(BufferStarted(incarnation=2))
    (issued,) = log.decide()
    assert isinstance(issued, GroupsIssued)
    assert [(group.group_id, group.attempt) for group in issued.groups] == [(2, 1), (3, 0), (4, 0)]
    log.complete(2)
    log.complete(3)
    log.decide()
    log.add(aborted(4, 0))
    log.train(1)
    log.add(saved(2, oldest=2))
    assert RunFinished in kinds(log.decide())
    assert log.state.books().trained == 4


def test_a_run_whose_groups_are_all_rejected_is_given_up_and_tried_again_by_the_next_buffer() -> None:
    log = Log(max_barren_groups=4)
    log.announce(0)
    log.decide()
    for group_id in range(3):
        log.complete(group_id, outcome=Outcome.DROP)
        log.decide()
    log.complete(3, outcome=Outcome.DROP)
    (failed,) = log.decide()
    assert isinstance(failed, RunFailed)
    assert "filter_drop (4)" in failed.reason
    assert log.decide() == []
    log.add(BufferStarted(incarnation=2))
    log.complete(4)
    log.complete(5)
    assert BatchReady in kinds(log.decide())


def test_a_buffer_that_starts_again_counts_rejected_groups_as_the_one_before() -> None:
    """Each spare is one of them; only a run that was given up is tried with a new count."""
    log = Log(max_barren_groups=3, keep_when_insufficient=True, rollout_batch_size=4, over_sampling_batch_size=4)
    log.announce(0)
    log.decide()
    for group_id, verdict in enumerate((Outcome.SPARE, Outcome.SPARE, Outcome.DROP)):
        log.complete(group_id, outcome=verdict)
    log.add(BufferStarted(incarnation=2))
    assert (len(log.state.in_stage(Stage.SPARE)), log.state.barren) == (2, 3)
    for group_id in (3, 4):
        log.decide()
        log.complete(group_id, outcome=Outcome.DROP)
    (failed,) = log.decide()
    assert isinstance(failed, RunFailed)
    assert "5 prompt groups in a row" in failed.reason
    log.add(BufferStarted(incarnation=3))
    assert (len(log.state.in_stage(Stage.SPARE)), log.state.barren) == (2, 2)


@pytest.mark.parametrize("brings_tokens", [True, False])
def test_a_group_that_is_halted_again_and_again_is_dropped_only_if_it_brings_no_tokens(brings_tokens: bool) -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=1, max_attempts=5)
    log.announce(0)
    log.decide()
    for attempt in range(6):
        if log.state.groups.get(0) is None:
            break
        (sample,) = aborted(0, attempt).samples
        length = 10 * (attempt + 1) if brings_tokens else 10
        longer = msgspec.structs.replace(sample, response_len=length)
        log.add(msgspec.structs.replace(aborted(0, attempt), samples=(longer,)))
        log.decide()
    assert log.state.dropped == ({} if brings_tokens else {"max_attempts": 1})
    assert log.state.books().closed


def test_a_batch_ends_the_count_of_rejected_groups() -> None:
    log = Log(max_barren_groups=3)
    log.announce(0)
    log.decide()
    log.complete(0, outcome=Outcome.DROP)
    log.complete(1, outcome=Outcome.DROP)
    log.decide()
    log.complete(2)
    log.complete(3)
    assert kinds(log.decide()) == [BatchReady]
    assert log.state.barren == 0


def test_what_a_halt_drops_does_not_count_as_rejected() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=5, on_halt="drop", max_barren_groups=3)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.decide()
    for group_id in range(1, 5):
        log.add(aborted(group_id, 0))
    assert kinds(log.decide()) == [GroupsClosed]
    log.train(0)
    assert kinds(log.decide()) == [GroupsIssued]


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    log = Log(evals=(EvalPlan(name="test", interval=1, num_items=1),))
    log.announce(0)
    log.decide()
    samples = tuple(
        SampleSummary(index=i, status=SampleStatus.COMPLETED, reward=r) for i, r in enumerate((1.0, 0, 0, 0))
    )
    log.add(EvalCompleted(step=0, set="test", item=0, version=1, instance="r", samples=samples))
    ended = log.decide()[0]
    assert isinstance(ended, EvalEnded)
    # by hand: 1 - C(3, k) / C(4, k)
    assert [ended.metrics[f"eval/test-pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])


actions = st.lists(
    st.tuples(
        st.sampled_from(["complete", "drop", "abort", "fail", "train", "announce", "save", "repeat", "restart"]),
        st.integers(0, 40),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.sampled_from([0, 1, 2]), st.sampled_from([2, 3, 5]), st.sampled_from(["resume", "drop"]))
def test_books_close_and_no_group_is_in_two_batches(
    script: list[tuple[str, int]], staleness: int, over_sampling: int, on_halt: str
) -> None:
    log = Log(num_steps=6, max_staleness=staleness, over_sampling_batch_size=over_sampling, on_halt=on_halt)
    log.announce(0)
    for action, number in script:
        log.decide()
        _act(log, action, number)
        assert log.state.books().closed
    batches = {event.step: event for event in log.events if isinstance(event, BatchReady)}
    batched = [ref.group_id for batch in batches.values() for ref in batch.groups]
    assert len(batched) == len(set(batched))
    assert _folded(log.events) == msgspec.json.encode(log.state)


def _act(log: Log, action: str, number: int) -> None:
    live = [g for g in log.state.groups.values() if g.stage is Stage.IN_FLIGHT]
    waiting = [step for step, batch in log.state.batches.items() if not batch.trained]
    if action in ("complete", "drop", "abort", "fail") and live:
        group = live[number % len(live)]
        if action == "abort":
            log.add(aborted(group.group_id, group.attempt, payload=number + 1))
        elif action == "fail":
            event = {"lease": "l", "round": 0, "instance": "r", "reason": "poison"}
            log.add(GroupFailed(group_id=group.group_id, attempt=group.attempt, **event))
        else:
            log.complete(group.group_id, outcome=Outcome.KEEP if action == "complete" else Outcome.DROP)
    elif action == "train" and waiting:
        log.train(min(waiting))
    elif action == "announce":
        log.announce(log.state.trained_steps)
    elif action == "save":
        log.add(saved(log.state.trained_steps, max(0, log.state.trained_steps - 2)))
    elif action == "repeat" and log.events:  # an event delivered twice under a new sequence number
        event = log.events[number % len(log.events)]
        if not isinstance(event, SnapshotTaken | RunFinished | RunFailed):
            log.add(event)
    elif action == "restart":  # fold what a snapshot covers, then the rest
        state = msgspec.json.decode(msgspec.json.encode(log.state), type=LedgerState)
        log.state = state


def _folded(events: list[Message]) -> bytes:
    state = LedgerState()
    for seq, event in enumerate(events, start=1):
        fold(state, event, seq)
        fold(state, event, seq)  # a redelivery under the same sequence number
    return msgspec.json.encode(state)
