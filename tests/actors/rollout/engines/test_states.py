"""The states of an engine by hand, and over whatever may happen to one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.states import (
    ImpossibleTransition,
    Trigger,
    accepts_requests,
    is_published,
    may_continue,
    next_state,
)
from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE = EngineState.SUSPECT, EngineState.GONE

LIVES: dict[str, list[tuple[Trigger, EngineState]]] = {
    "an ordinary one": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.UPDATE_BEGAN, UPDATING),
        (Trigger.UPDATED, CURRENT),
    ],
    "one that refuses later weights": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.UPDATE_BEGAN, UPDATING),
        (Trigger.REFUSED, STARTING),
        (Trigger.REFUSED, STARTING),
        (Trigger.ADMITTED, CURRENT),
    ],
    "one that dies during an update, which ends later": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.UPDATE_BEGAN, UPDATING),
        (Trigger.LOST, GONE),
        (Trigger.UPDATED, GONE),
        (Trigger.FOUND, STARTING),
    ],
    "one that could not be told to go on": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.UPDATE_BEGAN, UPDATING),
        (Trigger.LEFT_PAUSED, PAUSED),
        (Trigger.CONTINUED, STARTING),
        (Trigger.ADMITTED, CURRENT),
    ],
    "one that hangs": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.STALLED, SUSPECT),
        (Trigger.LOST, GONE),
    ],
    "one that hung for a while": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.STALLED, SUSPECT),
        (Trigger.MOVED, STARTING),
    ],
    "one that hangs while it takes weights": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.UPDATE_BEGAN, UPDATING),
        (Trigger.STALLED, SUSPECT),
        (Trigger.UPDATED, SUSPECT),
        (Trigger.LOST, GONE),
    ],
    "one beside the trainer": [
        (Trigger.ADMITTED, CURRENT),
        (Trigger.RELEASED, RELEASED),
        (Trigger.RESUMED, STARTING),
        (Trigger.ADMITTED, CURRENT),
    ],
    "one that starts while the trainer has the memory": [
        (Trigger.RELEASED, RELEASED),
        (Trigger.REROUTED, RELEASED),
        (Trigger.RESUMED, STARTING),
        (Trigger.RELEASED, RELEASED),
        (Trigger.RESUMED, STARTING),
        (Trigger.ADMITTED, CURRENT),
    ],
    "one that does not take its memory again": [
        (Trigger.RELEASED, RELEASED),
        (Trigger.STALLED, SUSPECT),
        (Trigger.LOST, GONE),
    ],
    "one whose router is lost": [(Trigger.ADMITTED, CURRENT), (Trigger.REROUTED, STARTING)],
}


@pytest.mark.parametrize("life", list(LIVES))
def test_the_life_of_an_engine(life: str) -> None:
    state = STARTING
    for trigger, expected in LIVES[life]:
        state = next_state(state, trigger)
        assert (trigger, state) == (trigger, expected)


@pytest.mark.parametrize(
    ("state", "trigger"),
    [
        (CURRENT, Trigger.ADMITTED),
        (STARTING, Trigger.UPDATE_BEGAN),
        (PAUSED, Trigger.ADMITTED),
        (SUSPECT, Trigger.ADMITTED),
        (GONE, Trigger.ADMITTED),
        (GONE, Trigger.STALLED),
        (CURRENT, Trigger.RESUMED),
        (STARTING, Trigger.CONTINUED),
    ],
)
def test_what_cannot_happen_is_an_error(state: EngineState, trigger: Trigger) -> None:
    with pytest.raises(ImpossibleTransition, match=f"is not allowed in state {state}"):
        next_state(state, trigger)


@given(st.lists(st.sampled_from(list(Trigger)), max_size=40))
def test_only_an_admission_has_an_engine_asked_and_every_loss_ends_that(triggers: list[Trigger]) -> None:
    state = STARTING
    for trigger in triggers:
        before = state
        try:
            state = next_state(state, trigger)
        except ImpossibleTransition:
            continue
        if accepts_requests(state) and not accepts_requests(before):
            assert (before, trigger) == (STARTING, Trigger.ADMITTED)
        if trigger is Trigger.LOST:
            assert state is GONE
        assert is_published(before, state) == (before is not state and {before, state} != {CURRENT, UPDATING})


@given(st.lists(st.sampled_from(list(Trigger)), max_size=40))
def test_every_engine_can_come_back(triggers: list[Trigger]) -> None:
    state = STARTING
    for trigger in triggers:
        try:
            state = next_state(state, trigger)
        except ImpossibleTransition:
            continue
    for trigger in (Trigger.LOST, Trigger.FOUND, Trigger.ADMITTED):
        state = next_state(state, trigger)
    assert state is CURRENT


@pytest.mark.parametrize("state", list(EngineState))
def test_another_ones_engine_is_continued_only_where_we_paused_it(state: EngineState) -> None:
    assert may_continue(state, ours=False, paused_by_us=False) == (state is PAUSED)
    assert may_continue(state, ours=False, paused_by_us=True) == (state in (PAUSED, STARTING, GONE))
    assert may_continue(state, ours=True, paused_by_us=False) == (state in (PAUSED, STARTING, GONE))
