"""The trainer's fold over the log."""

from typing import Any

import msgspec
import pytest

from actors.trainer.data import history as history_module
from actors.trainer.data.history import History
from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointRequested,
    CheckpointSaved,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Outcome,
    PayloadsMissing,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from tests.actors.trainer.logs import completed


def folded(*events: Any) -> History:
    history = History()
    for seq, event in enumerate(events, start=1):
        history.fold(event, seq)
    return history


def ready(step: int, *refs: tuple[int, int]) -> BatchReady:
    groups = tuple(GroupRef(group_id=group, attempt=0, event_seq=seq) for group, seq in refs)
    return BatchReady(incarnation=1, step=step, groups=groups)


def trained(step: int) -> BatchTrained:
    return BatchTrained(step=step, incarnation=1, num_groups=1, num_samples=1, num_tokens=1, metrics={})


def announced(version: int, step: int) -> WeightsAnnounced:
    return WeightsAnnounced(version=version, step=step, incarnation=1, path="", checksum="", size_bytes=0)


def test_an_empty_log_knows_nothing() -> None:
    history = folded()
    assert (history.frontier, history.incarnation, history.version, history.confirmed) == (0, 0, 0, 0)


def test_a_batch_of_several_events_is_one_once_all_of_them_are_here() -> None:
    parts = [msgspec.structs.replace(ready(0, (index, 9 + index)), index=index, num_events=3) for index in range(3)]
    history = folded(*parts[:2])
    assert history.batches == {}
    history.fold(parts[2], 3)
    assert [ref.group_id for ref in history.batches[0].groups] == [0, 1, 2]
    assert folded(parts[0], parts[2]).batches == folded(*parts[1:]).batches == {}


def test_the_frontier_is_the_furthest_step_ever_done_whatever_was_replayed_later() -> None:
    assert folded(trained(0), trained(1), trained(0)).frontier == 2


def test_versions_are_the_highest_seen_and_know_their_steps() -> None:
    applied = WeightsApplied(version=1, instance="rollout", num_engines=1, took_s=0.0)
    history = folded(announced(1, 0), announced(2, 1), announced(3, 0), applied)
    assert (history.version, history.confirmed, history.steps_of_versions) == (3, 1, {1: 0, 2: 1, 3: 0})


def test_the_incarnation_is_the_highest_seen() -> None:
    history = folded(TrainerStarted(incarnation=2, step=0), TrainerStarted(incarnation=1, step=0))
    assert history.incarnation == 2


def test_groups_are_kept_until_their_batch_is_settled_or_they_are_closed() -> None:
    closed = GroupsClosed(incarnation=1, group_ids=(3,), outcome="dropped", reason="nonzero_std")
    history = folded(completed(1, 0), completed(2, 0), completed(3, 0), completed(4, 0), closed, ready(0, (1, 1)))
    assert sorted(history.completed) == [1, 2, 4]
    history.settle(1)
    assert (sorted(history.completed), history.batches) == ([2, 4], {})


def test_a_rejected_group_and_with_it_its_payload_is_not_kept() -> None:
    def judged(group: int, seq: int, outcome: Outcome) -> VerdictGiven:
        return VerdictGiven(group_id=group, attempt=0, event_seq=seq, outcome=outcome)

    history = folded(completed(1, 0), completed(2, 0), judged(1, 1, Outcome.DROP), judged(2, 2, Outcome.KEEP))
    assert sorted(history.completed) == [2]
    assert not history._seqs_of_groups.keys() - {2}


def test_batches_that_are_settled_already_are_not_kept() -> None:
    history = History()
    history.settle(1)
    history.fold(completed(1, 0), 1)
    history.fold(ready(0, (1, 1)), 2)
    assert (history.completed, history.batches) == ({}, {})


def test_the_first_batch_of_a_step_counts() -> None:
    history = folded(ready(0, (1, 1)), ready(0, (2, 2)))
    assert history.batches[0].groups[0].group_id == 1


def test_completed_groups_that_no_batch_takes_do_not_pile_up(monkeypatch) -> None:
    monkeypatch.setattr(history_module, "MAX_WAITING_GROUPS", 3)
    assert sorted(folded(*(completed(group, 0) for group in range(5))).completed) == [3, 4, 5]


def missing(step: int, *refs: tuple[int, int]) -> PayloadsMissing:
    return PayloadsMissing(step=step, incarnation=1, groups=ready(step, *refs).groups, reason="purged")


def test_a_batch_with_lost_payloads_gives_way_to_the_next_one_of_its_step() -> None:
    history = folded(completed(1, 0), completed(2, 0), ready(0, (1, 1), (2, 2)), missing(0, (2, 2)))
    assert history.batches == {}
    assert sorted(history.completed) == [1]  # ready again; what is lost is not
    history.fold(ready(0, (1, 1), (2, 6)), 7)
    history.fold(missing(0, (2, 2)), 8)  # told twice
    assert [ref.event_seq for ref in history.batches[0].groups] == [1, 6]


def test_a_batch_that_was_trained_once_is_not_taken_back() -> None:
    history = folded(completed(1, 0), ready(0, (1, 1)), trained(0), missing(0, (1, 1)))
    assert history.batches.keys() == {0}


def test_a_zombie_that_trained_a_batch_before_it_was_taken_back_settles_nothing() -> None:
    history = folded(completed(1, 0), ready(0, (1, 1)), missing(0, (1, 1)), trained(0))
    assert (history.frontier, history.batches) == (0, {})
    history.fold(ready(0, (1, 6)), 7)
    assert [ref.event_seq for ref in history.batches[0].groups] == [6]


def test_a_checkpoint_that_was_told_settles_what_no_loadable_one_lacks() -> None:
    checkpoint = CheckpointSaved(step=2, incarnation=1, path="", oldest_step=1, took_s=0)
    history = folded(completed(1, 0), ready(0, (1, 1)), ready(1, (2, 2)), checkpoint)
    assert (history._steps.checkpoint_step, sorted(history.batches), history.completed) == (2, [1], {})


def test_the_newest_request_for_a_checkpoint_counts() -> None:
    asked = [CheckpointRequested(step=step, stream="data", used=0.8) for step in (2, 4, 3)]
    assert folded(*asked).requested_step == 4


def ledger_of(*events: Any) -> LedgerState:
    state = LedgerState()
    for seq, event in enumerate(events, start=1):
        if isinstance(event, LEDGER_EVENTS):
            fold(state, event, seq)
    return msgspec.json.decode(msgspec.json.encode(state), type=LedgerState)  # as a snapshot brings it


def run_of_three_steps() -> list[Any]:
    """Three steps trained; group 6 waits for the fourth, group 7 was dropped, group 2 was made twice."""
    issued = tuple(IssuedGroup(group_id=group, attempt=0, prompt=group) for group in range(8))
    again = (IssuedGroup(group_id=2, attempt=1, prompt=2),)

    def kept(group: int, event_seq: int, outcome: Outcome = Outcome.KEEP) -> VerdictGiven:
        return VerdictGiven(group_id=group, attempt=0, event_seq=event_seq, outcome=outcome)

    def batch(step: int, *refs: tuple[int, int, int]) -> BatchReady:
        groups = tuple(GroupRef(group_id=group, attempt=attempt, event_seq=seq) for group, attempt, seq in refs)
        return BatchReady(incarnation=1, step=step, groups=groups)

    lost = GroupRef(group_id=2, attempt=0, event_seq=9)
    return [
        TrainerStarted(incarnation=1, step=0), announced(1, 0),  # 1, 2
        GroupsIssued(incarnation=1, round=0, min_version=1, groups=issued),  # 3
        completed(0, 1), kept(0, 4), batch(0, (0, 0, 4)), trained(0), announced(2, 1),  # 4 - 8
        completed(2, 2), kept(2, 9), completed(1, 3), kept(1, 11), batch(1, (1, 0, 11), (2, 0, 9)),  # 9 - 13
        PayloadsMissing(step=1, incarnation=1, groups=(lost,), reason="purged"),  # 14
        GroupsIssued(incarnation=1, round=1, min_version=2, groups=again),  # 15
        completed(2, 4, attempt=1), VerdictGiven(group_id=2, attempt=1, event_seq=16, outcome=Outcome.KEEP),  # 16, 17
        batch(1, (1, 0, 11), (2, 1, 16)), trained(1), announced(3, 2),  # 18 - 20
        CheckpointSaved(step=2, incarnation=1, path="", oldest_step=1, took_s=0.0),  # 21
        completed(3, 5), kept(3, 22), batch(2, (3, 0, 22)),  # 22 - 24
        completed(6, 6), kept(6, 25), completed(7, 7), kept(7, 27, Outcome.DROP),  # 25 - 28
        CheckpointRequested(step=2, stream="data", used=0.7), trained(2), announced(4, 3),  # 29 - 31
    ]  # fmt: skip


@pytest.mark.parametrize("covers", range(32))
def test_a_snapshot_and_the_rest_of_the_log_give_what_the_whole_log_gives(covers: int) -> None:
    events = run_of_three_steps()
    history = History(ledger_of(*events[:covers]))
    for seq, event in enumerate(events, start=1):
        if seq >= history.from_seq:  # what is before may be trimmed
            history.fold(event, seq)
    whole = folded(*events)
    whole.settle(1)
    history.settle(1)
    for name in ("frontier", "incarnation", "version"):
        assert getattr(history, name) == getattr(whole, name), name
    assert history._steps.checkpoint_step == whole._steps.checkpoint_step
    assert {step: batch.groups for step, batch in history.batches.items()} == {
        step: batch.groups for step, batch in whole.batches.items()
    }
    cited = {ref.event_seq for batch in whole.batches.values() for ref in batch.groups}
    assert {seq: history.completed[seq] for seq in cited | {25}} == {seq: whole.completed[seq] for seq in cited | {25}}
    needed = {1, 2, 3, 4}  # group 2 of the batch that is kept was issued under version 1
    assert {version: history.steps_of_versions[version] for version in needed} == {1: 0, 2: 1, 3: 2, 4: 3}


def verdict(seq: int, outcome: Outcome) -> VerdictGiven:
    return VerdictGiven(group_id=1, attempt=0, event_seq=seq, outcome=outcome)


def test_groups_that_a_verdict_kept_are_known_until_they_are_over() -> None:
    two = completed(1, 90), completed(2, 91)
    assert [*folded(*two, verdict(2, Outcome.KEEP), verdict(1, Outcome.KEEP)).kept] == [2, 1]
    assert [*folded(*two, verdict(1, Outcome.DROP), verdict(1, Outcome.KEEP)).kept] == []
    kept = *two, verdict(1, Outcome.KEEP), verdict(2, Outcome.KEEP)
    assert [*folded(*kept, GroupsClosed(incarnation=1, group_ids=(2,), outcome="dropped", reason="surplus")).kept] == [
        1
    ]
    history = folded(*kept, ready(0, (1, 1)), trained(0))
    history.settle(1)
    assert [*history.kept] == [2]


def test_without_a_filter_groups_are_kept_as_they_complete() -> None:
    two = completed(1, 90), completed(2, 91)
    assert [*folded(BufferStarted(incarnation=1, verdicts=False), *two).kept] == [2, 3]
    resumed = folded(BufferStarted(incarnation=1), *two, BufferStarted(incarnation=2, verdicts=False))
    assert [*resumed.kept] == [2, 3]
    filtered = folded(BufferStarted(incarnation=1, verdicts=False), two[0], BufferStarted(incarnation=2), two[1])
    assert [*filtered.kept] == [2]
    assert [*folded(BufferStarted(incarnation=1), *two).kept] == []


def test_a_snapshot_of_a_run_without_a_filter_says_so() -> None:
    history = History(ledger_of(BufferStarted(incarnation=1, verdicts=False)))
    history.fold(completed(1, 90), 2)
    assert [*history.kept] == [2]
