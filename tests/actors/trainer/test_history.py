"""The trainer's fold over the log."""

from typing import Any

from actors.trainer import history as history_module
from actors.trainer.history import History
from messages import (
    BatchReady,
    BatchTrained,
    GroupRef,
    GroupsClosed,
    Outcome,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
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
