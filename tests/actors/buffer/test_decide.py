"""Decisions on ledgers that are written down here, not folded: how much is issued, and what the pool gives."""

import pytest

from actors.buffer.decide import Schedule, decide
from messages import GroupsIssued, Message
from runtime.ledger import Group, LedgerState, Stage, fold

RUNS, ENDED, KEPT, POOLED = Stage.IN_FLIGHT, Stage.COMPLETED, Stage.READY, Stage.POOLED


def ledger(*stages: Stage, **fields: int) -> LedgerState:
    """A ledger in round 0 under the first weights, with one group per stage, in order of issue."""
    groups = {
        number: Group(
            group_id=number, attempt=0, prompt=number, round=0, min_version=1, stage=stage, event_seq=1, payload_seq=1
        )
        for number, stage in enumerate(stages)
    }
    return LedgerState(**{"version": 1, "next_group": len(groups), "next_prompt": len(groups), **fields}, groups=groups)


def schedule(batch: int, over_sampling: int, max_staleness: int = 0) -> Schedule:
    return Schedule(
        num_steps=9, rollout_batch_size=batch, over_sampling_batch_size=over_sampling, max_staleness=max_staleness
    )


def issued(state: LedgerState, rules: Schedule) -> list[tuple[int, int]]:
    """Group and attempt of what is issued next; nothing when the decision is another or none."""
    decision = decide(state, rules)
    if not isinstance(decision, GroupsIssued):
        return []
    return [(group.group_id, group.attempt) for group in decision.groups]


def test_a_round_begins_with_one_refill() -> None:
    assert issued(ledger(), schedule(4, 6)) == [(group, 0) for group in range(6)]


@pytest.mark.parametrize("stages", [[RUNS] * 4, [RUNS] * 6, [KEPT, KEPT, RUNS, RUNS], [KEPT, ENDED, RUNS, RUNS]])
def test_nothing_is_issued_while_those_kept_and_those_running_suffice(stages: list[Stage]) -> None:
    assert issued(ledger(*stages), schedule(4, 6)) == []


@pytest.mark.parametrize("stages", [[RUNS] * 3, [KEPT] * 3, [KEPT, ENDED, RUNS]])
def test_a_refill_is_a_whole_over_sampling_batch_however_few_are_missing(stages: list[Stage]) -> None:
    assert issued(ledger(*stages), schedule(4, 6)) == [(group, 0) for group in range(3, 9)]


def test_surplus_of_the_round_before_counts_towards_the_next() -> None:
    assert issued(ledger(KEPT, KEPT, KEPT, round=1, version_step=1), schedule(4, 4)) == [(3 + n, 0) for n in range(4)]


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
