"""What is told of a ledger, against books kept by hand."""

import msgspec
import pytest

from messages import (
    BatchReady,
    BatchTrained,
    Message,
    MessageDeadLettered,
    PayloadsMissing,
    RunStalled,
    UntrainedSamples,
)
from runtime.ledger.books import LedgerReport, LedgerSummary, lines_of
from runtime.ledger.fold import Books
from runtime.ledger.group_life import GroupLife
from tests.build.events import batch, completed, issued, trained
from tests.support.log_of_a_run import LOG, THE_END

BOOKS = Books(issued=8, trained=4, skipped=0, dropped=2, failed=1, pooled=0, ready=0, in_flight=1)


def summary_of(*events: Message, live: bool = False) -> LedgerSummary:
    report = LedgerReport()
    for seq, event in enumerate(events, start=1):
        report.take(event, seq)
    return report.summary("r", live=live)


def life_of(group_id: int, *events: Message) -> list[tuple[int, Message]]:
    life = GroupLife(group_id)
    taken = ((seq, life.take(event, seq)) for seq, event in enumerate(events, start=1))
    return [(seq, event) for seq, event in taken if event is not None]


def test_the_books_of_a_small_run_by_hand() -> None:
    summary = summary_of(*LOG)
    assert summary.books == BOOKS
    assert summary.books.closed
    assert (summary.dropped, summary.failed) == ({"zero_std": 1, "too_stale": 1}, {"no score": 1})
    assert (summary.steps, summary.round, summary.version, summary.checkpoint_step) == (2, 2, 3, 2)


def test_groups_are_listed_by_the_step_that_trained_them_also_if_the_trainer_died_before_it_said_so() -> None:
    assert summary_of(*LOG).trained == ((0, (0, 1)), (1, (3, 5)))


def test_a_step_that_is_trained_again_is_listed_once() -> None:
    again = (trained(0, incarnation=3, replay=True), trained(1, incarnation=3, replay=True))
    assert summary_of(*LOG, *again).trained == summary_of(*LOG).trained


def test_the_listed_groups_are_as_many_as_the_books_say_after_every_event() -> None:
    for end in range(len(LOG)):
        summary = summary_of(*LOG[:end])
        assert summary.books.closed
        assert sum(len(group_ids) for _, group_ids in summary.trained) == summary.books.trained


def test_people_read_the_books_as_a_sum_with_all_reasons() -> None:
    assert list(lines_of(summary_of(*LOG))) == [
        "run         r, not finished (no node daemon runs it)",
        "groups      8 issued = 4 trained + 0 skipped + 2 dropped + 1 failed + 0 pooled + 0 ready + 1 in flight",
        "            dropped: 1 too_stale",
        "            dropped: 1 zero_std",
        "            failed: 1 no score",
        "steps       2 trained; round 2 is open",
        "weights     v3 of step 2",
        "checkpoint  of step 2",
        "evaluation  runs after step 2 (weights v3): 1 of 2 items of heldout; none yet",
    ]


def skipping(step: int, *group_ids: int, replay: bool = False) -> BatchTrained:
    """A step of which some groups left no gradient, and of group 1 a sample more."""
    names = {group_id: ((0, 0),) for group_id in group_ids} | {1: ((2, 0),)}
    untrained = [
        UntrainedSamples(group_id=group, reason="not_finite", samples=samples) for group, samples in names.items()
    ]
    told = trained(step, replay=replay)
    return msgspec.structs.replace(told, untrained=tuple(untrained), skipped_groups=group_ids)


def test_groups_that_left_no_gradient_are_skipped_and_not_trained() -> None:
    log = [*LOG[:13], skipping(0, 0), skipping(0, 0, replay=True)]
    summary = summary_of(*log)
    assert (summary.books.trained, summary.books.skipped, summary.books.closed) == (1, 1, True)
    assert (summary.trained, summary.skipped) == (((0, (1,)),), ((0, (0,)),))
    assert summary.untrained == {"not_finite": 2}  # the step was told twice and counts once
    lines = list(lines_of(summary))
    assert "1 trained + 1 skipped" in lines[1]
    assert "            skipped: 2 samples not_finite" in lines


def test_a_life_says_which_samples_of_the_group_left_no_gradient() -> None:
    log = [*LOG[:13], skipping(0, 0)]
    (zero,), (one,) = (
        [event for _, event in life_of(group, *log) if isinstance(event, BatchTrained)] for group in (0, 1)
    )
    assert (zero.skipped_groups, [item.samples for item in zero.untrained]) == ((0,), [((0, 0),)])
    assert (one.skipped_groups, [item.samples for item in one.untrained]) == ((), [((2, 0),)])


def test_a_stall_is_told_until_anything_happens() -> None:
    stalled = RunStalled(idle_s=61.0, waiting={"buffer": "the first weights"})
    assert list(lines_of(summary_of(*LOG, stalled)))[-2:] == [
        "stalled     nothing happened for 1m01s",
        "            buffer: the first weights",
    ]
    assert summary_of(*LOG, stalled, trained(1, replay=True)).stalled is None


def test_an_empty_ledger_is_told_too() -> None:
    assert list(lines_of(summary_of(live=True))) == [
        "run         r, not finished (read from its bus)",
        "groups      0 issued = 0 trained + 0 skipped + 0 dropped + 0 failed + 0 pooled + 0 ready + 0 in flight",
        "steps       0 trained; round 0 is open",
        "weights     none yet",
        "checkpoint  none yet",
        "evaluation  none yet",
    ]


def test_a_finished_run_says_why() -> None:
    assert next(lines_of(summary_of(*LOG, THE_END))) == "run         r, finished: trained 2 steps"


@pytest.mark.parametrize(
    ("group_id", "seqs"),
    [
        (0, [3, 4, 5, 10, 14]),
        (2, [3, 7, 8]),
        (3, [3, 12, 16, 18, 19, 20, 23, 26]),  # its step is told by the trainer's next start
        (4, [3, 13]),
        (6, [17, 24]),
        (7, [17]),
        (8, []),
    ],
)
def test_a_life_is_every_event_that_speaks_of_the_group(group_id: int, seqs: list[int]) -> None:
    assert [seq for seq, _ in life_of(group_id, *LOG)] == seqs


def test_of_an_event_about_several_groups_a_life_has_its_own_part() -> None:
    assert life_of(1, issued(0, 1, 2), completed(0), completed(1)) == [(1, issued(1)), (3, completed(1))]


def test_a_task_that_nobody_can_read_is_part_of_a_life() -> None:
    lost = MessageDeadLettered(subject="phy.r.work.rollout.1.0", reason="no such field", dead_seq=1)
    assert life_of(1, issued(0, 1), lost) == [(1, issued(1)), (2, lost)]
    assert life_of(0, issued(0, 1), lost) == [(1, issued(0))]


def test_a_batch_that_is_taken_back_is_part_of_a_life() -> None:
    """Group 1 lost nothing, and is trained in the batch that is made instead."""
    log = [*LOG[:11], missing(0, (0, 4)), batch(0, (1, 6)), trained(0)]
    lives = {group_id: [event for _, event in life_of(group_id, *log)] for group_id in (0, 1)}
    assert [type(event) for event in lives[1]][-4:] == [BatchReady, PayloadsMissing, BatchReady, BatchTrained]
    assert lives[1][-3] == missing(0)
    assert lives[0][-1] == missing(0, (0, 4))


def missing(step: int, *refs: tuple[int, int]) -> PayloadsMissing:
    return PayloadsMissing(step=step, incarnation=1, groups=batch(step, *refs).groups, reason="purged")


def test_a_replayed_step_is_part_of_a_life() -> None:
    again = trained(0, incarnation=2, replay=True)
    assert life_of(0, *LOG, again)[-1] == (len(LOG) + 1, again)
