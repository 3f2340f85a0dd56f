"""What the ledger keeps for a data source with a state: the outcomes of groups, in order, and where its state lies."""

import msgspec

from messages import BufferStarted, GroupFailed, GroupsClosed, GroupsIssued, IssuedGroup, Outcome
from runtime.ledger.fold import fold, fold_in_parts
from runtime.ledger.state import GroupOutcome, LedgerState
from tests.build.events import completed, verdict
from tests.support.ledger_log import Log


def issued(first: int, count: int, *, num_told: int = 0, draws: tuple[int, ...] = (9,)) -> GroupsIssued:
    groups = tuple(IssuedGroup(group_id=i, attempt=0, prompt=i + 100) for i in range(first, first + count))
    return GroupsIssued(
        incarnation=1, round=0, min_version=1, groups=groups, draws=draws, draws_digest="ab", num_told=num_told
    )


def log_with_a_source() -> Log:
    log = Log()
    log.add(BufferStarted(incarnation=1, tells_source=True))
    log.announce(0)
    log.add(issued(0, 4))
    return log


def test_each_group_has_one_outcome_in_the_order_of_the_log() -> None:
    log = log_with_a_source()
    log.complete(2, reward=0.5)
    log.complete(0, reward=1.0, outcome=Outcome.DROP)
    log.add(GroupFailed(group_id=1, attempt=0, lease="l", round=0, instance="r", reason="timeout"))
    log.complete(3, outcome=Outcome.SPARE)
    log.add(GroupsClosed(incarnation=1, group_ids=(2, 3), outcome="dropped", reason="stale"))  # both have theirs
    assert log.state.outcomes == (
        GroupOutcome(number=102, kind="kept", rewards=(0.5,)),
        GroupOutcome(number=100, kind="dropped", rewards=(1.0,), reason="filter_drop"),
        GroupOutcome(number=101, kind="failed", reason="timeout"),
        GroupOutcome(number=103, kind="dropped", rewards=(1.0,)),
    )
    assert [outcome.reward for outcome in log.state.outcomes] == [0.5, 1.0, None, 1.0]


def test_an_issue_takes_the_outcomes_that_the_source_was_told() -> None:
    log = log_with_a_source()
    for group_id in (0, 1, 2):
        log.complete(group_id)
    log.add(issued(4, 1, num_told=2, draws=(20, 21)))  # the third outcome came while the source drew
    assert [outcome.number for outcome in log.state.outcomes] == [102]
    assert (log.state.draws, log.state.draws_digest) == ((20, 21), "ab")
    assert log.state.groups[4].draws == (20, 21)
    assert log.state.groups[3].draws == (9,)


def test_a_repeated_issue_changes_neither_the_state_of_the_source_nor_the_outcomes() -> None:
    log = log_with_a_source()
    log.complete(0)
    log.add(issued(4, 1, num_told=1, draws=(20,)))
    log.complete(1)
    for repeated in (issued(0, 4, num_told=1), issued(4, 1, num_told=1, draws=(20,))):
        log.add(repeated)
        assert (log.state.draws, [outcome.number for outcome in log.state.outcomes]) == ((20,), [101])


def test_the_newest_state_and_the_rows_of_live_groups_are_not_purged() -> None:
    log = log_with_a_source()
    log.add(issued(4, 1, draws=(20,)))
    assert log.state.low_water() <= 9
    for group_id in range(5):
        log.add(GroupsClosed(incarnation=1, group_ids=(group_id,), outcome="dropped", reason="r"))
    log.state.newest_payload = 99
    assert log.state.low_water() == 20


def test_an_issue_that_is_folded_in_parts_takes_outcomes_once() -> None:
    states: list[LedgerState] = []
    for whole in (True, False):
        log = log_with_a_source()
        log.complete(0)
        log.complete(1)
        event, seq = issued(4, 1200, num_told=1, draws=(20,)), len(log.events) + 1
        if whole:
            fold(log.state, event, seq)
        else:
            list(fold_in_parts(log.state, event, seq))
        states.append(log.state)
    assert msgspec.json.encode(states[0]) == msgspec.json.encode(states[1])
    assert [outcome.number for outcome in states[0].outcomes] == [101]


def test_a_run_without_such_a_source_keeps_no_outcomes() -> None:
    log = log_with_a_source()
    log.complete(0)
    log.add(BufferStarted(incarnation=2))
    assert log.state.outcomes == ()
    log.add(verdict(1, log.add(completed(1, 0)), Outcome.KEEP))
    assert log.state.outcomes == ()
