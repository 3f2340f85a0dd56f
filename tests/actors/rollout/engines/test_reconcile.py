"""The next step of an engine: by hand, and from every state, whatever is wanted and happens meanwhile."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.memory.levels import MemoryLevel
from actors.rollout.engines.reconcile import Actual, NextStep, Wanted, next_step
from actors.rollout.engines.states import accepts_requests
from messages import EngineState

NOTHING, WEIGHTS, LOADED, EVERYTHING = MemoryLevel
ROOMS = (NOTHING, WEIGHTS, EVERYTHING)  # of an engine
STARTING, CURRENT, RELEASED = EngineState.STARTING, EngineState.CURRENT, EngineState.RELEASED
DOWN = (EngineState.GONE, EngineState.SUSPECT, EngineState.PAUSED, EngineState.QUARANTINED)
MAX_STEPS = 8  # to what is wanted, from any state

SERVES = Wanted(3, EVERYTHING)
TABLE: list[tuple[str, Wanted, Actual, NextStep]] = [
    ("a new one", SERVES, Actual(STARTING, False, 0, EVERYTHING), NextStep.FIND),
    *((f"one that is {each}", SERVES, Actual(each, False, 3, EVERYTHING), NextStep.FIND) for each in DOWN),
    ("one without weights", SERVES, Actual(STARTING, True, 0, EVERYTHING), NextStep.UPDATE),
    ("before the first weights", Wanted(0, EVERYTHING), Actual(STARTING, True, 0, EVERYTHING), NextStep.WAIT),
    ("one that holds them", SERVES, Actual(STARTING, True, 3, EVERYTHING), NextStep.REGISTER),
    ("one that serves", SERVES, Actual(CURRENT, True, 3, EVERYTHING), NextStep.WAIT),
    ("one that serves older ones", SERVES, Actual(CURRENT, True, 2, EVERYTHING), NextStep.UPDATE),
    ("one that runs alone", SERVES, Actual(STARTING, True, 0, EVERYTHING, is_apart=True), NextStep.WAIT),
    ("one that serves, for the trainer", Wanted(3, NOTHING), Actual(CURRENT, True, 3, EVERYTHING), NextStep.GIVE_BACK),
    ("one with memory for weights", Wanted(3, NOTHING), Actual(STARTING, True, 0, WEIGHTS), NextStep.GIVE_BACK),
    ("a released one, for the trainer", Wanted(3, NOTHING), Actual(RELEASED, True, 0, NOTHING), NextStep.WAIT),
    ("a released one, afterwards", Wanted(3, WEIGHTS), Actual(RELEASED, True, 0, NOTHING), NextStep.TAKE_WEIGHTS),
    ("before the new weights", Wanted(3, WEIGHTS), Actual(STARTING, True, 0, WEIGHTS), NextStep.WAIT),
    ("with the new weights", Wanted(4, LOADED), Actual(STARTING, True, 0, WEIGHTS), NextStep.UPDATE),
    ("one that has all memory early", Wanted(4, LOADED), Actual(STARTING, True, 4, EVERYTHING), NextStep.WAIT),
    ("one that lacks memory", Wanted(4, EVERYTHING), Actual(STARTING, True, 4, WEIGHTS), NextStep.TAKE_REST),
]


@pytest.mark.parametrize(("wanted", "actual", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_next_step(wanted: Wanted, actual: Actual, step: NextStep) -> None:
    assert next_step(wanted, actual) is step


def after(step: NextStep, wanted: Wanted, actual: Actual) -> Actual:
    """What an engine has after a step that succeeds."""
    match step:
        case NextStep.FIND:
            released = actual.room is NOTHING
            return actual._replace(state=RELEASED if released else STARTING, is_found=True, version=0)
        case NextStep.GIVE_BACK:
            return actual._replace(state=RELEASED, is_found=actual.state is STARTING, version=0, room=NOTHING)
        case NextStep.TAKE_WEIGHTS:
            return actual._replace(state=STARTING, room=WEIGHTS)
        case NextStep.UPDATE if wanted.memory is LOADED and actual.room is not EVERYTHING:
            return actual  # it loads them, and waits for the rest of its memory
        case NextStep.UPDATE | NextStep.TAKE_REST:
            return actual._replace(version=wanted.version, room=EVERYTHING)
        case NextStep.REGISTER:
            return actual._replace(state=CURRENT)
        case NextStep.WAIT:
            return actual


ACTUAL = [
    Actual(state, is_found, 0 if room is NOTHING else version, room)
    for state, is_found, version, room in product(EngineState, (False, True), (0, 2, 3), ROOMS)
    if is_found <= (state not in DOWN)
    and (state is RELEASED) == (room is NOTHING)
    and (not accepts_requests(state) or (version > 0 and room is EVERYTHING))
]
WANTED = [Wanted(version, memory) for version in (0, 3) for memory in MemoryLevel]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_from_every_state_steps_lead_to_what_is_wanted(wanted: Wanted) -> None:
    for actual in ACTUAL:
        if actual.version > wanted.version:
            continue
        for _ in range(MAX_STEPS):
            actual = after(next_step(wanted, actual), wanted, actual)
        assert after(next_step(wanted, actual), wanted, actual) == actual
        assert actual.is_found
        if wanted.memory is NOTHING:
            assert actual.room is NOTHING
        elif wanted == SERVES:
            assert (actual.state, actual.version) in ((CURRENT, 3), (EngineState.UPDATING, 3))
        else:
            assert actual.room >= min(wanted.memory, WEIGHTS)
            assert accepts_requests(actual.state) <= (actual.version == wanted.version or wanted.memory is WEIGHTS)


@given(st.lists(st.tuples(st.sampled_from(WANTED), st.sampled_from(["goes on", "is lost", "is rerouted"]))))
def test_whatever_happens_only_a_verified_engine_gets_requests(lives: list[tuple[Wanted, str]]) -> None:
    actual, newest = Actual(STARTING, False, 0, EVERYTHING), 0
    for wanted, event in lives:
        newest = max(newest, wanted.version)  # a target never goes back
        wanted = wanted._replace(version=newest)
        if event == "is lost":
            actual = actual._replace(state=EngineState.GONE, is_found=False)
        elif event == "is rerouted" and accepts_requests(actual.state):
            actual = actual._replace(state=STARTING, is_found=False)
        step, served = next_step(wanted, actual), accepts_requests(actual.state)
        if step is NextStep.REGISTER:
            assert actual.version == newest > 0
        actual = after(step, wanted, actual)
        assert served or step is NextStep.REGISTER or not accepts_requests(actual.state)
        assert not accepts_requests(actual.state) or (actual.version > 0 and actual.room is EVERYTHING)
