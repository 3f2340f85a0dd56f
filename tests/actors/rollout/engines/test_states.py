"""The states of an engine by hand, and over whatever may happen to one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.states import Happening, ImpossibleTransition, is_asked, is_told, may_continue, next_state
from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE = EngineState.SUSPECT, EngineState.GONE

LIVES: dict[str, list[tuple[Happening, EngineState]]] = {
    "an ordinary one": [
        (Happening.ADMITTED, CURRENT),
        (Happening.UPDATE_BEGAN, UPDATING),
        (Happening.UPDATED, CURRENT),
    ],
    "one that refuses later weights": [
        (Happening.ADMITTED, CURRENT),
        (Happening.UPDATE_BEGAN, UPDATING),
        (Happening.REFUSED, STARTING),
        (Happening.REFUSED, STARTING),
        (Happening.ADMITTED, CURRENT),
    ],
    "one that dies during an update, which ends later": [
        (Happening.ADMITTED, CURRENT),
        (Happening.UPDATE_BEGAN, UPDATING),
        (Happening.LOST, GONE),
        (Happening.UPDATED, GONE),
        (Happening.FOUND, STARTING),
    ],
    "one that could not be told to go on": [
        (Happening.ADMITTED, CURRENT),
        (Happening.UPDATE_BEGAN, UPDATING),
        (Happening.LEFT_PAUSED, PAUSED),
        (Happening.CONTINUED, STARTING),
        (Happening.ADMITTED, CURRENT),
    ],
    "one that hangs": [
        (Happening.ADMITTED, CURRENT),
        (Happening.STALLED, SUSPECT),
        (Happening.LOST, GONE),
    ],
    "one that hung for a while": [
        (Happening.ADMITTED, CURRENT),
        (Happening.STALLED, SUSPECT),
        (Happening.MOVED, STARTING),
    ],
    "one that hangs while it takes weights": [
        (Happening.ADMITTED, CURRENT),
        (Happening.UPDATE_BEGAN, UPDATING),
        (Happening.STALLED, SUSPECT),
        (Happening.UPDATED, SUSPECT),
        (Happening.LOST, GONE),
    ],
    "one beside the trainer": [
        (Happening.ADMITTED, CURRENT),
        (Happening.RELEASED, RELEASED),
        (Happening.RESUMED, STARTING),
        (Happening.ADMITTED, CURRENT),
    ],
    "one that starts while the trainer has the memory": [
        (Happening.RELEASED, RELEASED),
        (Happening.REROUTED, RELEASED),
        (Happening.RESUMED, STARTING),
        (Happening.RELEASED, RELEASED),
        (Happening.RESUMED, STARTING),
        (Happening.ADMITTED, CURRENT),
    ],
    "one that does not take its memory again": [
        (Happening.RELEASED, RELEASED),
        (Happening.STALLED, SUSPECT),
        (Happening.LOST, GONE),
    ],
    "one whose router is lost": [(Happening.ADMITTED, CURRENT), (Happening.REROUTED, STARTING)],
}


@pytest.mark.parametrize("life", list(LIVES))
def test_the_life_of_an_engine(life: str) -> None:
    state = STARTING
    for happening, expected in LIVES[life]:
        state = next_state(state, happening)
        assert (happening, state) == (happening, expected)


@pytest.mark.parametrize(
    ("state", "happening"),
    [
        (CURRENT, Happening.ADMITTED),
        (STARTING, Happening.UPDATE_BEGAN),
        (PAUSED, Happening.ADMITTED),
        (SUSPECT, Happening.ADMITTED),
        (GONE, Happening.ADMITTED),
        (GONE, Happening.STALLED),
        (CURRENT, Happening.RESUMED),
        (STARTING, Happening.CONTINUED),
    ],
)
def test_what_cannot_happen_is_an_error(state: EngineState, happening: Happening) -> None:
    with pytest.raises(ImpossibleTransition, match=f"not in state {state}"):
        next_state(state, happening)


@given(st.lists(st.sampled_from(list(Happening)), max_size=40))
def test_only_an_admission_has_an_engine_asked_and_every_loss_ends_that(happenings: list[Happening]) -> None:
    state = STARTING
    for happening in happenings:
        before = state
        try:
            state = next_state(state, happening)
        except ImpossibleTransition:
            continue
        if is_asked(state) and not is_asked(before):
            assert (before, happening) == (STARTING, Happening.ADMITTED)
        if happening is Happening.LOST:
            assert state is GONE
        assert is_told(before, state) == (before is not state and {before, state} != {CURRENT, UPDATING})


@given(st.lists(st.sampled_from(list(Happening)), max_size=40))
def test_every_engine_can_come_back(happenings: list[Happening]) -> None:
    state = STARTING
    for happening in happenings:
        try:
            state = next_state(state, happening)
        except ImpossibleTransition:
            continue
    for happening in (Happening.LOST, Happening.FOUND, Happening.ADMITTED):
        state = next_state(state, happening)
    assert state is CURRENT


@pytest.mark.parametrize("state", list(EngineState))
def test_another_ones_engine_is_continued_only_where_we_paused_it(state: EngineState) -> None:
    assert may_continue(state, ours=False, paused_by_us=False) == (state is PAUSED)
    assert may_continue(state, ours=False, paused_by_us=True) == (state in (PAUSED, STARTING, GONE))
    assert may_continue(state, ours=True, paused_by_us=False) == (state in (PAUSED, STARTING, GONE))
