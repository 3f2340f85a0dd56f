"""What the log folds to."""

from typing import Any

import msgspec
import pytest

from actors.buffer.deciding.decide import EvalPlan
from messages import (
    BatchReady,
    BufferStarted,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
    RolloutRequested,
    RoundHalted,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsSpilled,
    SnapshotTaken,
    TrainerStarted,
)
from runtime.ledger.fold import LedgerState, Stage, fold
from runtime.ledger.groups import spills_of
from tests.build.events import aborted, announced, completed, saved, snapshot, trained, verdict
from tests.build.samples import summary
from tests.support.ledger_log import Log, kinds, stored_log


def test_a_group_given_back_untouched_is_pooled_too() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    log.add(GroupAborted(group_id=0, attempt=0, lease="l", round=0, instance="r"))
    assert log.state.books().pooled == 1
    assert log.state.books().closed


@pytest.mark.parametrize(("held", "closed"), [(msgspec.UNSET, True), (2, False)])
def test_attempts_without_a_token_do_not_count_while_functions_are_held(held: Any, closed: bool) -> None:
    """A tool may take longer than many rounds."""
    log = Log(rollout_batch_size=1, max_attempts=1)
    log.announce(0)
    log.decide()
    log.add(GroupAborted(group_id=0, attempt=0, lease="l", round=0, instance="r", held=held))
    log.decide()
    assert (0 not in log.state.groups) is closed
    assert log.state.books().closed


def test_a_late_result_of_an_older_attempt_changes_nothing() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=2)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.decide()
    log.add(aborted(1, 0))
    log.train(0)
    log.decide()
    before = msgspec.json.encode(log.state.groups)
    log.add(completed(1, 0))
    log.add(verdict(1, len(log.events)))
    assert msgspec.json.encode(log.state.groups) == before


def test_only_the_first_verdict_counts_and_only_for_the_event_it_cites() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    seq = log.add(completed(0, 0))
    log.add(verdict(0, seq + 100, Outcome.DROP))
    assert log.state.groups[0].stage is Stage.COMPLETED
    log.add(verdict(0, seq))
    log.add(verdict(0, seq, Outcome.DROP))
    assert log.state.groups[0].stage is Stage.READY


def test_a_step_trained_again_after_a_crash_is_counted_once() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    log.train(0)
    log.add(TrainerStarted(incarnation=2, step=0))
    log.add(trained(0))
    assert log.state.books().trained == 2
    assert log.state.books().closed


def test_a_trainer_that_starts_ahead_of_the_log_settles_its_batches() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    log.complete(0)
    log.complete(1)
    log.decide()
    log.add(TrainerStarted(incarnation=2, step=1))
    assert log.state.books().trained == 2
    assert log.state.trained_steps == 1


def test_a_checkpoint_that_a_start_passes_over_is_saved_again_before_the_run_ends() -> None:
    """It was damaged after its checkpoint_saved: the trainer loads the one before it."""
    log = batched_log()
    log.train(0)
    log.add(saved(1, oldest=0))
    log.add(snapshot(log.state))
    assert (log.state.checkpoint_step, log.state.snapshot_step) == (1, 1)
    log.add(TrainerStarted(incarnation=2, step=0))
    assert (log.state.checkpoint_step, log.state.snapshot_step, log.state.trained_steps) == (0, 0, 1)
    log.add(trained(0, incarnation=2))
    log.add(saved(1, oldest=0, incarnation=2))
    assert (log.state.checkpoint_step, log.state.books().trained) == (1, 2)
    assert SnapshotTaken in kinds(log.decide())


def test_weights_of_a_trainer_that_was_replaced_are_not_taken_up() -> None:
    log = Log()
    log.add(announced(6, 5))
    log.add(TrainerStarted(incarnation=2, step=4))
    log.add(announced(7, 6))
    assert (log.state.version, log.state.version_step) == (6, 5)
    log.add(msgspec.structs.replace(announced(7, 4), incarnation=2))
    assert (log.state.version, log.state.version_step, log.state.version_steps[7]) == (7, 4, 4)


def test_payloads_are_needed_until_no_loadable_checkpoint_lacks_their_batch() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=1)
    log.announce(0)
    log.decide()
    seq = log.add(completed(0, 0, payload=11))
    log.add(verdict(0, seq))
    log.decide()
    log.train(0)
    assert log.state.low_water() == 11
    log.add(saved(1, oldest=0))
    assert log.state.low_water() == 11
    log.add(saved(2, oldest=1))
    assert log.state.low_water() == 12


def played() -> Log:
    """Two steps of a run with everything in them: a surplus, a halt, a rejected group, an evaluation, a checkpoint."""
    log = Log(over_sampling_batch_size=4, evals=(EvalPlan(name="test", interval=1, num_items=1),))
    for step in range(2):
        log.announce(step)
        log.decide()
        log.add(
            EvalCompleted(
                step=step, set="test", item=0, version=step + 1, instance="r", samples=(summary(0, (1, 0), reward=0.5),)
            )
        )
        log.decide()
        live = [group_id for group_id, group in log.state.groups.items() if group.stage is Stage.IN_FLIGHT]
        log.complete(live[0], outcome=Outcome.DROP)
        log.decide()
        while log.state.round == step:
            live = [group_id for group_id, group in log.state.groups.items() if group.stage is Stage.IN_FLIGHT]
            log.complete(live[0])
            log.decide()
        for group in list(log.state.groups.values()):
            if group.stage is Stage.IN_FLIGHT:
                log.add(aborted(group.group_id, group.attempt))
        log.add(trained(step))
    log.announce(2)
    log.add(saved(2, oldest=2))
    log.decide()
    return log


def test_an_event_of_the_ledger_that_comes_twice_changes_nothing_the_second_time() -> None:
    log = played()
    assert {type(event) for event in log.events} >= {GroupsIssued, BatchReady, RoundHalted, EvalIssued, SnapshotTaken}
    for event in list(log.events):
        if isinstance(event, GroupsIssued | BatchReady | RoundHalted | EvalIssued | EvalEnded | GroupsClosed):
            before = _without_position(log.state)
            log.add(event)
            assert _without_position(log.state) == before, event


def _without_position(state: LedgerState) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(state, last_seq=0))


def test_a_batch_of_groups_that_the_log_does_not_know_as_kept_is_no_batch() -> None:
    """Somebody else's append cannot get there; whatever does must not end every later buffer."""
    log = Log()
    log.announce(0)
    log.decide()
    refs = tuple(GroupRef(group_id=group_id, attempt=0, event_seq=1) for group_id in (0, 77))
    log.add(BatchReady(incarnation=1, step=0, groups=refs))
    log.add(BatchReady(incarnation=1, step=0, groups=()))
    log.add(GroupsClosed(incarnation=1, group_ids=(77,), outcome="dropped", reason="halted"))
    log.complete(0)
    log.complete(1)
    assert BatchReady in kinds(log.decide())
    log.train(0)
    assert (log.state.books().trained, log.state.books().closed) == (2, True)


def test_only_events_of_the_ledger_are_folded() -> None:
    with pytest.raises(TypeError, match="int"):
        fold(LedgerState(), 3, 1)  # type: ignore[arg-type]
    assert RolloutRequested.topic == "rollout"


def sampled(
    index: int, *seqs: int, tokens: int, version: int | None = None, reward: float | None = None
) -> SampleSummary:
    segments = tuple(SegmentRef(seq=seq, position=0) for seq in seqs)
    status = SampleStatus.ABORTED if reward is None else SampleStatus.COMPLETED
    return SampleSummary(
        index=index,
        status=status,
        segments=segments,
        response_len=tokens,
        reward=reward,
        first_version=version,
        last_version=version,
    )


def spilled(group_id: int, attempt: int, *samples: SampleSummary) -> SegmentsSpilled:
    return SegmentsSpilled(group_id=group_id, attempt=attempt, lease="l", round=0, instance="r", samples=samples)


def ended(group_id: int, *samples: SampleSummary, kind: Any = GroupCompleted, **fields: Any) -> Message:
    told = fields if kind is GroupFailed else {"samples": samples, **fields}
    return kind(group_id=group_id, attempt=0, lease="l", round=0, instance="r", **told)


def test_of_what_an_attempt_spilled_the_longest_of_each_sample_is_kept() -> None:
    log = issued_log()
    log.add(spilled(0, 0, sampled(0, 4, tokens=3), sampled(1, 4, tokens=3)))
    log.add(spilled(0, 0, sampled(1, 4, 6, tokens=9)))
    log.add(spilled(0, 0, sampled(0, 5, tokens=1)))  # another lease that began anew
    assert [(s.index, s.response_len) for s in spills_of(log.state, 0, 0)] == [(0, 3), (1, 9)]
    assert log.state.low_water() == 1
    assert (spills_of(log.state, 0, 1), spills_of(log.state, 1, 0)) == ((), ())


def test_spills_of_an_attempt_that_ended_change_nothing() -> None:
    log = issued_log()
    log.add(aborted(0, 0, payload=4))
    log.add(spilled(0, 0, sampled(0, 9, tokens=9)))
    assert log.state.groups[0].carried[0].segments[0].seq == 4
    assert (log.state.newest_payload, spills_of(log.state, 0, 0)) == (4, ())


def test_what_was_spilled_is_not_lost_when_the_attempt_is_given_back_without_it() -> None:
    """The answer to a task that was delivered again after its round was halted."""
    log = issued_log()
    log.add(spilled(0, 0, sampled(0, 4, tokens=3)))
    log.add(ended(0, sampled(1, 7, tokens=2), kind=GroupAborted))
    group = log.state.groups[0]
    assert [(sample.index, sample.response_len) for sample in group.carried] == [(0, 3), (1, 2)]
    assert (group.payload_seq, group.spilled) == (4, [])


def test_a_completed_group_needs_what_it_cites_and_no_other_spill() -> None:
    log = issued_log()
    log.add(spilled(0, 0, sampled(0, 4, tokens=3)))
    log.add(ended(0, sampled(0, 8, tokens=5, reward=1.0), data="d"))
    assert (log.state.groups[0].payload_seq, log.state.groups[0].spilled) == (8, [])


def test_a_group_with_too_few_or_too_many_samples_fails_with_both_numbers() -> None:
    log = issued_log(num_samples=2)
    whole = (sampled(0, 1, tokens=1, reward=1.0), sampled(1, 1, tokens=1, reward=0.0))
    siblings = msgspec.structs.replace(whole[1], part=1)
    log.add(ended(0, *whole, siblings, data="d"))
    log.add(ended(1, whole[0], data="d"))
    log.add(ended(2, *whole, sampled(5, 1, tokens=1, reward=1.0), data="d"))
    assert log.state.groups[0].stage is Stage.COMPLETED
    assert log.state.failed == {"1 samples where 2 were asked for": 1, "3 samples where 2 were asked for": 1}
    assert log.state.books().closed


def test_the_ledger_keeps_what_choosing_among_groups_needs() -> None:
    log = issued_log()
    log.add(
        ended(
            0,
            sampled(0, 1, tokens=5, reward=1.0, version=2),
            sampled(1, 1, tokens=7, reward=0.0, version=1),
            data="d",
        )
    )
    group = log.state.groups[0]
    assert (group.data, group.indices, group.rewards, group.response_lens) == ("d", (0, 1), (1.0, 0.0), (5, 7))
    assert (group.oldest_version, group.newest_version) == (1, 2)


def test_reasons_that_never_come_twice_do_not_fill_the_memory() -> None:
    state = LedgerState()
    groups = tuple(IssuedGroup(group_id=number, attempt=0, prompt=number) for number in range(300))
    fold(state, GroupsIssued(incarnation=1, round=0, min_version=1, groups=groups), 1)
    for number in range(300):
        fold(state, ended(number, kind=GroupFailed, reason=f"seen at {number}"), 2 + number)
    assert (len(state.failed), state.failed["other reasons"], state.books().failed) == (257, 44, 300)


def test_versions_are_remembered_as_long_as_a_live_group_may_have_tokens_of_them() -> None:
    log = issued_log()
    log.announce(1)
    log.announce(2)
    assert log.state.version_steps == {1: 0, 2: 1, 3: 2}  # groups of version 1 are in flight
    for group_id in range(3):
        log.add(GroupFailed(group_id=group_id, attempt=0, lease="l", round=0, instance="r", reason="poison"))
    log.announce(3)
    assert log.state.version_steps == {4: 3}


def test_versions_are_remembered_while_a_batch_with_tokens_of_them_may_be_trained_again() -> None:
    log = Log(rollout_batch_size=1, over_sampling_batch_size=1)
    log.announce(0)
    log.decide()
    log.complete(0)
    log.decide()
    log.train(0)
    log.train(1)
    assert log.state.version_steps == {1: 0, 2: 1, 3: 2}
    log.add(saved(2, oldest=2))
    log.announce(3)
    assert log.state.version_steps == {4: 3}


def test_a_spare_group_is_pooled_in_the_books_and_counts_as_rejected() -> None:
    log = issued_log()
    log.complete(0, outcome=Outcome.SPARE)
    assert (log.state.groups[0].stage, log.state.groups[0].reason) == (Stage.SPARE, "filter_spare")
    assert (log.state.books().pooled, log.state.barren, log.state.books().closed) == (1, 1, True)
    log.add(GroupsClosed(incarnation=1, group_ids=(0,), outcome="dropped", reason="r"))
    assert (log.state.dropped, log.state.barren) == ({"r": 1}, 1)


def batched_log() -> Log:
    """A batch of groups 0 and 1 is outstanding."""
    log = issued_log()
    log.complete(0)
    log.complete(1)
    assert BatchReady in kinds(log.decide())
    return log


def missing(log: Log, step: int, *numbers: int) -> PayloadsMissing:
    refs = tuple(log.state.batches[step].groups[number] for number in numbers)
    return PayloadsMissing(step=step, incarnation=1, groups=refs, reason="purged")


def test_a_batch_with_lost_payloads_is_taken_back() -> None:
    log = batched_log()
    lost = missing(log, 0, 0)
    for _ in range(2):  # the second is a duplicate
        log.add(lost)
        stages = {group_id: group.stage for group_id, group in log.state.groups.items() if group_id < 2}
        assert stages == {0: Stage.POOLED, 1: Stage.READY}
        assert (log.state.groups[0].carried, log.state.taken_back, log.state.batches) == ((), (0,), {})
        assert log.state.books().closed


def test_lost_payloads_of_a_trained_batch_change_nothing() -> None:
    log = batched_log()
    lost = missing(log, 0, 0, 1)
    log.train(0)
    before = _without_position(log.state)
    log.add(lost)
    assert _without_position(log.state) == before
    assert log.state.books().trained == 2


def test_a_zombie_that_trained_a_batch_before_it_was_taken_back_settles_nothing() -> None:
    """A trainer that was replaced tells of step 0 after its successor found payloads of that batch missing."""
    log = batched_log()
    log.add(TrainerStarted(incarnation=2, step=0))
    log.add(missing(log, 0, 0))
    before = _without_position(log.state)
    log.add(trained(0))
    assert _without_position(log.state) == before
    assert kinds(log.decide()) == [GroupsIssued]
    log.complete(0)
    assert BatchReady in kinds(log.decide())
    assert sorted(ref.group_id for ref in log.state.batches[0].groups) == [0, 1]
    log.train(0)
    assert (log.state.books().trained, log.state.taken_back, log.state.trained_steps) == (2, (), 1)


def started(number: int, *, start: str, step: int = 0) -> TrainerStarted:
    return TrainerStarted(incarnation=number, step=step, start=start)


STARTS = [((1, "first"), (2, "second")), ((1, "first"), (1, "second")), ((2, "first"), (3, ""))]


@pytest.mark.parametrize(("first", "second"), STARTS)
def test_no_fact_of_a_replaced_trainer_counts(first: tuple[int, str], second: tuple[int, str]) -> None:
    """It froze before it said them. Two that started at once may have the same incarnation."""
    log = batched_log()
    log.add(started(first[0], start=first[1]))
    log.add(started(second[0], start=second[1]))
    before, who = _without_position(log.state), {"incarnation": first[0], "start": first[1]}
    lost = msgspec.structs.replace(missing(log, 0, 0), **who)
    late = [lost, trained(0, **who), announced(7, 1, **who), saved(1, oldest=1, **who)]
    for fact in [*late, started(first[0], start=first[1], step=1), *late]:
        log.add(fact)
        assert _without_position(log.state) == before
    owner = {"incarnation": second[0], "start": second[1]}
    log.add(trained(0, **owner))
    log.add(announced(7, 1, **owner))
    assert (log.state.books().trained, log.state.version) == (2, 7)


def test_a_group_with_a_lost_payload_is_not_trained_by_the_word_of_a_replaced_trainer() -> None:
    """Its successor finds the payload lost, and trains the batch that is made instead."""
    log = batched_log()
    log.add(started(1, start="a"))
    log.add(started(2, start="b"))
    log.add(trained(0, start="a"))
    log.add(msgspec.structs.replace(missing(log, 0, 0), incarnation=2, start="b"))
    assert (log.state.books().trained, log.state.taken_back) == (0, (0,))


def test_facts_without_a_start_fold_as_in_the_version_that_wrote_them() -> None:
    """Its decisions followed from that: a step that any trainer reported was trained."""
    log = batched_log()
    log.add(started(1, start="a"))
    log.add(started(2, start="b"))
    log.add(trained(0))
    log.add(announced(7, 1))
    assert (log.state.books().trained, log.state.version) == (2, 1)


def test_a_batch_that_was_taken_back_is_not_made_again_by_its_own_event() -> None:
    log = batched_log()
    made = next(event for event in log.events if isinstance(event, BatchReady))
    log.add(missing(log, 0, 0))
    before = _without_position(log.state)
    log.add(made)
    assert _without_position(log.state) == before


def test_decisions_of_a_replaced_buffer_that_are_stored_again_change_nothing() -> None:
    log = batched_log()
    old = [event for event in log.events if event.topic.startswith("ledger.")]
    log.add(BufferStarted(incarnation=2, verdicts=False))
    before = _without_position(log.state)
    over = [RunFinished(incarnation=1, steps=1, reason="all"), RunFailed(incarnation=1, steps=1, reason="none left")]
    for event in [*old, BufferStarted(incarnation=1), BufferStarted(incarnation=2), *over]:
        log.add(event)
        assert _without_position(log.state) == before, event


def test_a_snapshot_from_before_a_checkpoint_does_not_stand_for_one_after_it() -> None:
    log = batched_log()
    early = snapshot(log.state)
    log.train(0)
    log.add(saved(1))
    log.add(early)
    assert kinds(log.decide())[0] is SnapshotTaken


def test_a_checkpoint_of_a_zombie_does_not_end_the_step_that_its_successor_needs_again() -> None:
    log = batched_log()
    log.add(TrainerStarted(incarnation=2, step=0))
    log.add(missing(log, 0, 0))
    before = _without_position(log.state)
    log.add(saved(1, oldest=1))
    assert _without_position(log.state) == before
    assert log.state.taken_back == (0,)
    assert kinds(log.decide()) == [GroupsIssued]


def issued_log(**settings: Any) -> Log:
    """Groups 0, 1 and 2 are in flight, of batches of two."""
    log = Log(over_sampling_batch_size=3, **settings)
    log.announce(0)
    assert kinds(log.decide()) == [GroupsIssued]
    return log


def test_a_task_that_nobody_can_read_fails_its_group_and_no_other() -> None:
    log = Log()
    log.announce(0)
    log.decide()
    for attempt, reason in ((1, "another attempt"), (0, "no such field"), (0, "again")):
        subject = f"phy.r.work.rollout.1.{attempt}"
        log.add(MessageDeadLettered(subject=subject, reason=reason, dead_seq=1))
    log.add(MessageDeadLettered(subject="phy.r.work.score.1.0", reason="no such field", dead_seq=2))
    assert log.state.failed == {"task: no such field": 1}
    assert list(log.state.groups) == [0]


def test_a_stored_prompt_is_kept_until_no_loadable_checkpoint_lacks_its_batch() -> None:
    log = stored_log()
    assert log.state.low_water() == 1  # what the groups will store is not known yet
    for group_id, payload in ((0, 21), (1, 22)):
        seq = log.add(completed(group_id, 0, payload=payload))
        log.add(verdict(group_id, seq))
    assert log.state.low_water() == 11
    log.decide()
    log.add(trained(0))
    assert log.state.low_water() == 11
    log.add(saved(1, 1))
    assert log.state.low_water() > 22


def test_a_group_that_is_issued_again_keeps_its_stored_prompt_unless_that_may_be_lost() -> None:
    log = stored_log()
    log.add(aborted(0, 0, payload=21))
    assert (log.state.groups[0].prompt_parts, log.state.groups[0].payload_seq) == ((11, 12), 11)
    again = (IssuedGroup(group_id=0, attempt=1, prompt=0),)
    log.add(GroupsIssued(incarnation=1, round=0, min_version=1, groups=again))
    for group_id, attempt, payload in ((0, 1, 23), (1, 0, 22)):
        seq = log.add(completed(group_id, attempt, payload=payload))
        log.add(verdict(group_id, seq, attempt=attempt))
    (ready,) = [event for event in log.decide() if isinstance(event, BatchReady)]
    assert log.state.groups[0].prompt_parts == (11, 12)
    log.add(PayloadsMissing(step=0, incarnation=1, groups=ready.groups[:1], reason="gone"))
    assert [log.state.groups[i].prompt_parts for i in (0, 1)] == [(), (13,)]
