"""Decisions on ledgers that are written down here, not folded: how much is issued, and what the pool gives."""

from typing import Any

import msgspec
import pytest

from actors.buffer.deciding.decide import EvalPlan, Schedule, decide, events_of
from actors.buffer.deciding.selection import Chosen, Selection
from messages import (
    BatchReady,
    BufferStarted,
    EvalIssued,
    GroupsClosed,
    GroupsIssued,
    Message,
    PayloadsMissing,
    RoundHalted,
    RunFailed,
    SnapshotTaken,
    encode,
)
from runtime.ledger.changes import Batched
from runtime.ledger.fold import FOLD_VERSION, Group, LedgerState, Stage, fold
from tests.support.ledger_log import check_that_a_restart_decides_the_same

RUNS, ENDED, KEPT, POOLED, SPARE = Stage.IN_FLIGHT, Stage.COMPLETED, Stage.READY, Stage.POOLED, Stage.SPARE


def ledger(*stages: Stage, **fields: Any) -> LedgerState:
    """A ledger in round 0 under the first weights, with one group per stage, in order of issue."""
    groups = {
        number: Group(
            group_id=number, attempt=0, prompt=number, round=0, min_version=1, stage=stage, event_seq=1, payload_seq=1
        )
        for number, stage in enumerate(stages)
    }
    return LedgerState(**{"version": 1, "next_group": len(groups), "next_prompt": len(groups), **fields}, groups=groups)


def schedule(batch: int, over_sampling: int, max_staleness: int = 0, **settings: Any) -> Schedule:
    sizes = {"rollout_batch_size": batch, "over_sampling_batch_size": over_sampling, "max_staleness": max_staleness}
    return Schedule(**{"num_steps": 9, **sizes, **settings})


def issued(state: LedgerState, rules: Schedule) -> list[tuple[int, int]]:
    """Group and attempt of what is issued next; nothing when the decision is another or none."""
    decision = decide(state, rules)
    if not isinstance(decision, GroupsIssued):
        return []
    return [(group.group_id, group.attempt) for group in decision.groups]


@pytest.mark.parametrize(("fold_version", "enough"), [(FOLD_VERSION, True), (FOLD_VERSION - 1, False)])
def test_a_snapshot_that_cannot_be_used_is_taken_anew(fold_version: int, *, enough: bool) -> None:
    state = ledger(checkpoint_step=2, version_step=2)
    assert isinstance(decide(state, schedule(4, 6)), SnapshotTaken)
    taken = SnapshotTaken(incarnation=1, covers=0, fold_version=fold_version)
    fold(state, taken, 1)
    assert isinstance(decide(state, schedule(4, 6)), SnapshotTaken) is not enough


def test_a_round_begins_with_one_refill() -> None:
    assert issued(ledger(), schedule(4, 6)) == [(group, 0) for group in range(6)]


def test_a_large_round_is_issued_by_several_events_that_every_server_takes() -> None:
    state, rules, events = ledger(), schedule(100_000, 100_000), list[GroupsIssued]()
    while isinstance(decision := decide(state, rules), GroupsIssued):
        assert len(encode(decision).payload) < 1 << 20  # the default limit of nats-server
        events.append(decision)
        fold(state, decision, len(events))
    assert decision is None
    assert {event.round for event in events} == {0}
    assert [group.group_id for event in events for group in event.groups] == list(range(100_000))
    assert state.books().in_flight == 100_000


def test_the_rest_of_a_large_issue_is_of_its_round_alone() -> None:
    state, rules = ledger(), schedule(5_000, 5_000)
    first = decide(state, rules)
    assert isinstance(first, GroupsIssued)
    assert (len(first.groups), first.more) == (4096, 904)
    fold(state, first, 1)
    fold(state, RoundHalted(incarnation=1, round=0), 2)
    next_round = decide(state, rules)
    assert isinstance(next_round, GroupsIssued)
    assert (next_round.round, len(next_round.groups), next_round.more) == (1, 4096, 904)


def batch_of(state: LedgerState, rules: Schedule) -> BatchReady:
    batch = decide(state, rules)
    assert isinstance(batch, BatchReady)
    return batch


def test_a_large_batch_is_made_by_several_events_that_every_server_takes() -> None:
    state = ledger(*[KEPT] * 100_000)
    batch = batch_of(state, schedule(100_000, 100_000))
    events = events_of(msgspec.structs.replace(batch, passed_over=tuple(range(200_000, 300_000))))
    assert max(len(encode(event).payload) for event in events) < 1 << 20  # the default limit of nats-server
    for seq, event in enumerate(events, start=1):
        assert not state.batches
        changes = fold(state, event, seq)
    assert [len(change.groups) for change in changes if isinstance(change, Batched)] == [100_000]
    assert state.batches[0].groups == batch.groups
    assert (state.gathered, len(state.in_stage(Stage.BATCHED))) == (None, 100_000)


def test_a_batch_whose_buffer_ends_between_its_events_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.buffer.deciding.decide.MAX_BATCHED", 2)
    state, rules = ledger(*[KEPT] * 5), schedule(5, 5)
    first, second, third = events_of(batch_of(state, rules))
    fold(state, first, 1)
    fold(state, BufferStarted(incarnation=1), 2)
    anew = events_of(batch_of(state, rules))
    for seq, event in enumerate((anew[0], second, third, *anew), start=3):
        assert not state.batches
        fold(state, event, seq)
    assert [ref.group_id for ref in state.batches[0].groups] == list(range(5))


@pytest.mark.parametrize("stages", [[RUNS] * 4, [RUNS] * 6, [KEPT, KEPT, RUNS, RUNS], [KEPT, ENDED, RUNS, RUNS]])
def test_nothing_is_issued_while_those_kept_and_those_running_suffice(stages: list[Stage]) -> None:
    assert issued(ledger(*stages), schedule(4, 6)) == []


@pytest.mark.parametrize("stages", [[RUNS] * 3, [KEPT] * 3, [KEPT, ENDED, RUNS]])
def test_a_refill_is_a_whole_over_sampling_batch_however_few_are_missing(stages: list[Stage]) -> None:
    assert issued(ledger(*stages), schedule(4, 6)) == [(group, 0) for group in range(3, 9)]


def test_surplus_of_the_round_before_counts_towards_the_next() -> None:
    assert issued(ledger(KEPT, KEPT, KEPT, round=1, version_step=1), schedule(4, 4)) == [(3 + n, 0) for n in range(4)]


def test_where_turns_wait_for_idle_engines_only_the_end_of_the_run_halts_a_round() -> None:
    late, over = ledger(RUNS, RUNS, round=1), ledger(RUNS, round=9, trained_steps=9)
    for state in (late, over):
        halted = decide(state, schedule(2, 2))
        assert isinstance(halted, RoundHalted)
        assert halted.round == 0
    assert not isinstance(decide(late, schedule(2, 2, halts=False)), RoundHalted)
    assert isinstance(decide(over, schedule(2, 2, halts=False)), RoundHalted)


@pytest.mark.parametrize("late", [KEPT, SPARE])
def test_surplus_is_dropped_where_the_recipe_says_so_and_its_round_begins_anew(late: Stage) -> None:
    state, rules = ledger(KEPT, late, RUNS, round=1, version_step=1, halted_round=0), schedule(4, 4, on_surplus="drop")
    decision = decide(state, rules)
    assert isinstance(decision, GroupsClosed)
    assert (set(decision.group_ids), decision.outcome, decision.reason) == ({0, 1}, "dropped", "surplus")
    fold(state, decision, 1)
    assert (state.dropped, state.barren, state.books().closed) == ({"surplus": 2}, 0, True)
    assert issued(state, rules) == [(3 + number, 0) for number in range(4)]


def test_nothing_is_surplus_while_a_batch_is_made_again_or_its_round_goes_on() -> None:
    rules = schedule(2, 4, on_surplus="drop", max_staleness=1)
    again = ledger(KEPT, KEPT, round=2, version_step=1)
    again.taken_back = (0,)
    decision = decide(again, rules)
    assert isinstance(decision, BatchReady)
    assert [ref.group_id for ref in decision.groups] == [0, 1]
    assert isinstance(decide(ledger(KEPT, KEPT, KEPT), rules), BatchReady)


def test_the_pool_is_taken_from_its_front_and_keeps_the_rest() -> None:
    state, rules = ledger(*[POOLED] * 8), schedule(4, 6)
    decision = decide(state, rules)
    assert isinstance(decision, GroupsIssued)
    assert [(group.group_id, group.attempt) for group in decision.groups] == [(group, 1) for group in range(6)]
    fold(state, decision, 1)
    assert [group.group_id for group in state.groups.values() if group.stage is POOLED] == [6, 7]
    assert (state.books().pooled, state.books().in_flight, state.next_group) == (2, 6, 8)


def test_fresh_prompts_make_up_for_what_the_pool_lacks() -> None:
    assert issued(ledger(POOLED, POOLED), schedule(4, 4)) == [(0, 1), (1, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_issuing_runs_ahead_of_the_weights_by_the_staleness_and_no_further(max_staleness: int) -> None:
    state, rules = ledger(), schedule(1, 1, max_staleness)
    rounds: list[int] = []
    while (decision := decide(state, rules)) is not None:
        _take(state, decision, rounds)
    assert rounds == list(range(max_staleness + 1))


def _take(state: LedgerState, decision: Message, rounds: list[int]) -> None:
    """Fold a decision; what it issues is generated and kept at once, so that only the weights hold the run up."""
    fold(state, decision, state.last_seq + 1)
    if isinstance(decision, GroupsIssued):
        rounds.append(decision.round)
        for group in decision.groups:
            state.move(state.groups[group.group_id], KEPT)


@pytest.mark.parametrize(
    ("stages", "number"), [([], 6), ([RUNS] * 5, 1), ([KEPT, ENDED, RUNS], 3), ([RUNS] * 6, 0), ([KEPT] * 3, 3)]
)
def test_group_by_group_a_refill_tops_up_by_exactly_what_is_missing(stages: list[Stage], number: int) -> None:
    assert len(issued(ledger(*stages), schedule(4, 6, refill="group"))) == number


def test_with_an_over_sampling_filter_the_target_is_the_over_sampling_batch() -> None:
    rules = schedule(4, 6, over_sampling_filter="sort_by_reward_std")
    assert len(issued(ledger(*[RUNS] * 5), rules)) == 6
    assert decide(ledger(*[KEPT] * 5, RUNS), rules) is None
    assert isinstance(decide(ledger(*[KEPT] * 6), rules), BatchReady)


def with_rewards(state: LedgerState, *rewards: tuple[float, ...]) -> LedgerState:
    for group, given in zip(state.groups.values(), rewards, strict=True):
        group.rewards, group.indices = given, tuple(range(len(given)))
    return state


def test_the_over_sampling_filter_chooses_the_batch_and_the_others_are_closed() -> None:
    rewards = ((1.0, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 2.0), (1.0, 0.0))
    state = with_rewards(ledger(*[KEPT] * 5), *rewards)
    state.groups[4].event_seq = 2  # came last, beyond the target
    rules = schedule(2, 4, over_sampling_filter="sort_by_reward_std")
    batch = decide(state, rules)
    assert isinstance(batch, BatchReady)
    assert ([ref.group_id for ref in batch.groups], batch.passed_over) == ([1, 3], (0, 2))
    fold(state, batch, 3)
    closed = decide(state, rules)
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.outcome, closed.reason) == ((0, 2), "dropped", "over_sampling_filter")
    fold(state, closed, 4)
    assert state.groups[4].stage is KEPT
    assert (state.books().dropped, state.books().ready) == (2, 3)


def test_a_users_over_sampling_filter_is_asked_before_the_batch_is_made() -> None:
    state, rules = ledger(*[KEPT] * 3), schedule(2, 3, over_sampling_filter="m:f")
    asked = decide(state, rules)
    assert isinstance(asked, Selection)
    assert ([group.group_id for group in asked.groups], asked.count) == ([0, 1, 2], 2)
    batch = decide(state, rules, Chosen(kind="over_sampling_filter", group_ids=(2, 0)))
    assert isinstance(batch, BatchReady)
    assert ([ref.group_id for ref in batch.groups], batch.passed_over) == ([0, 2], (1,))


@pytest.mark.parametrize(("name", "taken"), [("fifo", [0, 1]), ("newest", [3, 2]), ("by_reward", [2, 1])])
def test_the_buffer_filter_says_who_goes_on_first(name: str, taken: list[int]) -> None:
    state = with_rewards(ledger(*[POOLED] * 4), (), (0.5,), (0.75,), (0.25,))
    assert [group for group, _ in issued(state, schedule(2, 2, buffer_filter=name))] == taken


def test_a_users_buffer_filter_may_take_fewer_and_fresh_prompts_make_up_for_them() -> None:
    state, rules = ledger(*[POOLED] * 3), schedule(2, 2, buffer_filter="m:f")
    asked = decide(state, rules)
    assert isinstance(asked, Selection)
    assert ([group.group_id for group in asked.groups], asked.count) == ([0, 1, 2], 2)
    decision = decide(state, rules, Chosen(kind="buffer_filter", group_ids=(2,)))
    assert isinstance(decision, GroupsIssued)
    assert [(group.group_id, group.attempt) for group in decision.groups] == [(2, 1), (3, 0)]


def test_the_buffer_filter_is_not_asked_when_the_pool_is_empty_or_nothing_is_wanted() -> None:
    rules = schedule(2, 2, buffer_filter="m:f")
    assert isinstance(decide(ledger(), rules), GroupsIssued)
    assert decide(ledger(POOLED, RUNS, RUNS), rules) is None


def test_the_pool_is_bounded_and_the_oldest_beyond_are_given_up() -> None:
    state, rules = ledger(*[POOLED] * 10), schedule(2, 2)
    closed = decide(state, rules)
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.reason) == ((0, 1), "pool_full")
    fold(state, closed, 1)
    assert isinstance(decide(state, rules), GroupsIssued)


def test_halted_groups_that_nobody_takes_are_given_up_after_some_rounds() -> None:
    """The data stream is emptied only up to the oldest payload that somebody needs."""
    for round in (8, 9):
        state, rules = ledger(*[POOLED] * 3, round=round, version_step=round), schedule(2, 2, num_steps=20)
        state.groups[1].round = 1
        state.groups[2].reason = "payloads_missing"
        decision = decide(state, rules)
        if round == 8:
            assert isinstance(decision, GroupsIssued)
        else:
            assert isinstance(decision, GroupsClosed)
            assert (decision.group_ids, decision.reason) == ((0,), "left_in_pool")


def test_an_exhausted_filter_is_overruled_with_the_newest_spares() -> None:
    state, rules = ledger(SPARE, KEPT, SPARE, SPARE, barren=3), schedule(3, 4, keep_when_insufficient=True)
    state.groups[3].event_seq, state.groups[2].event_seq = 5, 4
    for settings, kind in (({"max_barren_groups": 4}, GroupsIssued), ({"max_barren_groups": 3}, BatchReady)):
        assert isinstance(decide(state, msgspec.structs.replace(rules, **settings)), kind)
    rules = msgspec.structs.replace(rules, max_barren_groups=3)
    batch = decide(state, rules)
    assert isinstance(batch, BatchReady)
    assert [ref.group_id for ref in batch.groups] == [1, 2, 3]
    state.groups[0].reason = "zero_std_1.0"
    fold(state, batch, 6)
    closed = decide(state, rules)
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.reason) == ((0,), "zero_std_1.0")


def test_spares_that_would_never_make_a_batch_end_the_run() -> None:
    """Failures count for good: a run of which nothing can be trained is given up all the same."""
    rules = schedule(3, 4, keep_when_insufficient=True, max_barren_groups=3)
    assert isinstance(decide(ledger(SPARE, barren=3), rules), GroupsIssued)
    assert isinstance(decide(ledger(SPARE, barren=4), rules), RunFailed)


def test_no_more_spares_are_held_than_an_over_sampling_batch() -> None:
    state = ledger(*[SPARE] * 5)
    for group in state.groups.values():
        group.reason = f"r{group.group_id}"
    closed = decide(state, schedule(3, 3, keep_when_insufficient=True))
    assert isinstance(closed, GroupsClosed)
    assert (closed.group_ids, closed.reason) == ((0,), "r0")


def test_with_enough_kept_an_exhausted_over_sampling_filter_takes_what_there_is() -> None:
    rules = schedule(2, 4, over_sampling_filter="sort_by_reward_std", max_barren_groups=5)
    assert isinstance(decide(ledger(KEPT, KEPT, KEPT, barren=4), rules), GroupsIssued)
    batch = decide(ledger(KEPT, KEPT, KEPT, barren=5), rules)
    assert isinstance(batch, BatchReady)
    assert len(batch.groups) == 2


@pytest.mark.parametrize(("limit", "dropped"), [(None, ()), (3, ()), (2, (0,)), (1, (0, 1))])
def test_groups_with_too_old_tokens_are_dropped_when_a_batch_is_made(
    limit: int | None, dropped: tuple[int, ...]
) -> None:
    state = ledger(KEPT, KEPT, KEPT, round=3, version=4, version_step=3)
    state.version_steps = {1: 0, 2: 1, 3: 2, 4: 3}
    for group, version in zip(state.groups.values(), (1, 2, 4), strict=True):
        group.oldest_version = version
    decision = decide(state, schedule(3, 3, max_token_staleness=limit))
    if dropped:
        assert isinstance(decision, GroupsClosed)
        assert (decision.group_ids, decision.reason) == (dropped, "stale")
    else:
        assert isinstance(decision, BatchReady)


def test_an_evaluation_is_issued_before_the_batch_whose_weights_would_end_it() -> None:
    """At staleness 1 the batch of step 2 could be made on weights of step 1; those of step 2 are to be evaluated."""
    plans = (EvalPlan(name="e", interval=2, num_items=1, skip_before_train=True),)
    rules = schedule(1, 1, max_staleness=1, evals=plans)
    state = ledger(KEPT, round=2, version=2, version_step=1)
    assert decide(state, rules) is None
    state.version, state.version_step = 3, 2
    evaluation = decide(state, rules)
    assert isinstance(evaluation, EvalIssued)
    fold(state, evaluation, 2)
    batch = decide(state, rules)
    assert isinstance(batch, BatchReady)
    assert batch.step == 2
    waits = msgspec.structs.replace(rules, eval_overlap=False)
    assert decide(state, waits) is None


def test_nothing_is_issued_beside_an_evaluation_that_everything_waits_for() -> None:
    plans = (EvalPlan(name="e", interval=1, num_items=1),)
    for overlap, decisions in ((True, 2), (False, 1)):
        state, made = ledger(), 0
        rules = schedule(1, 1, evals=plans, eval_overlap=overlap)
        while (decision := decide(state, rules)) is not None:
            assert isinstance(decision, EvalIssued | GroupsIssued)
            made += 1
            fold(state, decision, made)
        assert made == decisions


def test_a_batch_that_was_taken_back_is_made_again_with_what_it_had() -> None:
    """Also when later ones are outstanding; what runs goes on, and only what is missing is issued."""
    state, rules = ledger(*[KEPT] * 4, RUNS), schedule(2, 4, max_staleness=1, over_sampling_filter="sort_by_reward_std")
    events = _decided(state, rules, 1)
    assert isinstance(events[0], BatchReady)
    lost = PayloadsMissing(step=0, incarnation=1, groups=events[0].groups[:1], reason="purged")
    fold(state, lost, 10)
    state.move(state.groups[4], KEPT)
    again = decide(state, rules)
    assert isinstance(again, BatchReady)
    assert (again.step, len(again.groups), again.passed_over) == (0, 2, ())
    assert events[0].groups[1] in again.groups


def test_what_a_taken_back_batch_lacks_is_issued_even_after_the_last_round() -> None:
    state, rules = ledger(KEPT, KEPT), schedule(2, 2, num_steps=1)
    (batch,) = _decided(state, rules, 1)
    assert isinstance(batch, BatchReady)
    fold(state, PayloadsMissing(step=0, incarnation=1, groups=batch.groups, reason="purged"), 10)
    assert issued(state, rules) == [(0, 1), (1, 1)]
    (decision,) = _decided(state, rules, 11)
    assert isinstance(decision, GroupsIssued)
    assert decision.round > state.halted_round


def _decided(state: LedgerState, rules: Schedule, seq: int) -> list[Message]:
    made: list[Message] = []
    while isinstance(decision := decide(state, rules), Message):
        made.append(decision)
        fold(state, decision, seq + len(made))
    return made


CLOSED_KINDS: dict[str, tuple[Stage, dict[str, Any], dict[str, Any]]] = {
    "spares": (SPARE, {}, {"keep_when_insufficient": True}),
    "not chosen": (Stage.PASSED_OVER, {}, {}),
    "surplus": (KEPT, {"round": 1}, {"on_surplus": "drop"}),
    "stale": (KEPT, {"round": 5, "version_step": 5, "version_steps": {1: 0}}, {"max_token_staleness": 1}),
    "halted": (POOLED, {}, {"on_halt": "drop"}),
    "worn": (POOLED, {}, {"max_attempts": 1}),
}


@pytest.mark.parametrize(("stage", "fields", "settings"), CLOSED_KINDS.values(), ids=CLOSED_KINDS)
def test_groups_are_closed_in_the_order_of_the_log(
    stage: Stage, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    """A restarted buffer has other indices, which follow the order of issue. Here the last group ended first."""
    state, rules = ledger(*[stage] * 5, **fields), schedule(2, 2, **settings)
    for group in state.groups.values():
        group.event_seq, group.fruitless, group.oldest_version = 9 - group.group_id, 1, 1
    for group in list(state.groups.values())[::-1]:
        state.move(group, RUNS)
        state.move(group, stage)
    check_that_a_restart_decides_the_same(state, rules)
    closed = decide(state, rules)
    assert isinstance(closed, GroupsClosed)
    assert closed.group_ids == (4, 3, 2, 1, 0)[: 3 if stage is SPARE else 5]
