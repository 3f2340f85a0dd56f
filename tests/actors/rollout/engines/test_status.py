"""An engine's states and next steps: by hand, from every status, and over whatever may happen to one."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.status import (
    EngineStatus,
    ImpossibleTransition,
    MemoryLevel,
    NextStep,
    Trigger,
    UpdateStage,
    Wanted,
    accepts_requests,
    changed,
    is_published,
    may_continue,
    next_state,
    next_step,
)
from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE, QUARANTINED = EngineState.SUSPECT, EngineState.GONE, EngineState.QUARANTINED
NOTHING, WEIGHTS, LOADED, EVERYTHING = MemoryLevel
DOWN = (GONE, SUSPECT, PAUSED, QUARANTINED)
MAX_STEPS = 10  # to what is wanted, from any status

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


def found(state: EngineState, version: int, room: MemoryLevel = EVERYTHING, **fields: UpdateStage) -> EngineStatus:
    return EngineStatus(state, is_found=True, version=version, room=room, **fields)


SERVES = Wanted(3, EVERYTHING)
FILLED, RESUMED = UpdateStage.LOADED, UpdateStage.RESUMED
TABLE: list[tuple[str, Wanted, EngineStatus, NextStep]] = [
    ("a new one", SERVES, EngineStatus(), NextStep.FIND),
    *((f"one that is {each}", SERVES, EngineStatus(each, version=3), NextStep.FIND) for each in DOWN),
    ("one without weights", SERVES, found(STARTING, 0), NextStep.LOAD),
    ("before the first weights", Wanted(0, EVERYTHING), found(STARTING, 0), NextStep.WAIT),
    ("one that holds them", SERVES, found(STARTING, 3), NextStep.REGISTER),
    ("one that serves", SERVES, found(CURRENT, 3), NextStep.WAIT),
    ("one that serves older ones", SERVES, found(CURRENT, 2), NextStep.LOAD),
    ("one that has loaded", SERVES, found(UPDATING, 2, stage=FILLED), NextStep.RESUME),
    ("one that generates again", SERVES, found(UPDATING, 2, stage=RESUMED), NextStep.VERIFY),
    ("whatever is announced meanwhile", Wanted(9, EVERYTHING), found(UPDATING, 2, stage=RESUMED), NextStep.VERIFY),
    ("one lost when it has loaded", SERVES, EngineStatus(GONE, stage=FILLED), NextStep.FIND),
    ("one that runs alone", SERVES._replace(apart=True), found(STARTING, 0), NextStep.WAIT),
    ("one that takes its turn", SERVES._replace(apart=True), found(UPDATING, 2, stage=FILLED), NextStep.RESUME),
    ("one that serves, for the trainer", Wanted(3, NOTHING), found(CURRENT, 3), NextStep.GIVE_BACK),
    ("one with memory for weights", Wanted(3, NOTHING), found(STARTING, 0, WEIGHTS), NextStep.GIVE_BACK),
    ("a loaded one, for the trainer", Wanted(3, NOTHING), found(STARTING, 0, WEIGHTS, stage=FILLED), NextStep.RESUME),
    ("a resumed one", Wanted(3, NOTHING), found(STARTING, 0, WEIGHTS, stage=RESUMED), NextStep.GIVE_BACK),
    ("a released one, for the trainer", Wanted(3, NOTHING), found(RELEASED, 0, NOTHING), NextStep.WAIT),
    ("a released one, afterwards", Wanted(3, WEIGHTS), found(RELEASED, 0, NOTHING), NextStep.TAKE_WEIGHTS),
    ("before the new weights", Wanted(3, WEIGHTS), found(STARTING, 0, WEIGHTS), NextStep.WAIT),
    ("with the new weights", Wanted(4, LOADED), found(STARTING, 0, WEIGHTS), NextStep.LOAD),
    ("one that waits for memory", Wanted(4, LOADED), found(STARTING, 0, WEIGHTS, stage=RESUMED), NextStep.WAIT),
    ("one that gets it", Wanted(4, EVERYTHING), found(STARTING, 0, WEIGHTS, stage=RESUMED), NextStep.TAKE_REST),
    ("one that has all memory early", Wanted(4, LOADED), found(STARTING, 4), NextStep.WAIT),
    ("one that lacks memory", Wanted(4, EVERYTHING), found(STARTING, 4, WEIGHTS), NextStep.TAKE_REST),
]


@pytest.mark.parametrize(("wanted", "engine", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_next_step(wanted: Wanted, engine: EngineStatus, step: NextStep) -> None:
    assert next_step(wanted, engine) is step


def after(step: NextStep, wanted: Wanted, engine: EngineStatus) -> EngineStatus:
    """The status of an engine after a step that succeeds."""
    match step:
        case NextStep.FIND:
            state = RELEASED if engine.room is NOTHING else STARTING
            return engine._replace(state=state, is_found=True, version=0, stage=UpdateStage.NONE)
        case NextStep.GIVE_BACK:
            return changed(engine, Trigger.RELEASED, version=0, room=NOTHING, stage=UpdateStage.NONE)
        case NextStep.TAKE_WEIGHTS:
            return changed(engine, Trigger.RESUMED, room=WEIGHTS)
        case NextStep.LOAD:
            began = Trigger.UPDATE_BEGAN if engine.state is CURRENT else None
            return changed(engine, began, stage=UpdateStage.LOADED)
        case NextStep.RESUME:
            return changed(engine, None, stage=UpdateStage.RESUMED)
        case NextStep.VERIFY:
            return changed(engine, Trigger.UPDATED, version=wanted.version, stage=UpdateStage.NONE)
        case NextStep.TAKE_REST:
            return changed(engine, None, room=EVERYTHING)
        case NextStep.REGISTER:
            return changed(engine, Trigger.ADMITTED)
        case NextStep.WAIT:
            return engine


ENGINES = [
    EngineStatus(state, is_found=is_found, version=0 if room is NOTHING else version, room=room, stage=stage)
    for state, is_found, version, room, stage in product(
        EngineState, (False, True), (0, 2, 3), (NOTHING, WEIGHTS, EVERYTHING), UpdateStage
    )
    if is_found <= (state not in DOWN)
    and (state is RELEASED) == (room is NOTHING)
    and (not accepts_requests(state) or (version > 0 and room is EVERYTHING))
    and (stage is UpdateStage.NONE or (state in (STARTING, UPDATING) and version < 3))
    and (state is not UPDATING or stage is not UpdateStage.NONE)
]
WANTED = [Wanted(version, memory) for version in (0, 3) for memory in MemoryLevel]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_from_every_status_steps_lead_to_what_is_wanted(wanted: Wanted) -> None:
    for engine in ENGINES:
        if engine.version > wanted.version or (engine.stage is not UpdateStage.NONE and not wanted.version):
            continue
        for _ in range(MAX_STEPS):
            engine = after(next_step(wanted, engine), wanted, engine)
        assert after(next_step(wanted, engine), wanted, engine) == engine
        assert engine.is_found
        if wanted.memory is NOTHING:
            assert engine.room is NOTHING
        elif wanted == SERVES:
            assert (engine.state, engine.version) == (CURRENT, 3)
        else:
            assert engine.room >= min(wanted.memory, WEIGHTS)
            assert engine.accepts_requests <= (engine.version == wanted.version or wanted.memory is WEIGHTS)


EVENTS = ["goes on", "is lost", "is rerouted", "is quarantined", "fails"]


@given(st.lists(st.tuples(st.sampled_from(WANTED), st.sampled_from(EVENTS))))
def test_whatever_happens_only_a_verified_engine_gets_requests(lives: list[tuple[Wanted, str]]) -> None:
    engine, newest = EngineStatus(), 0
    for wanted, event in lives:
        newest = max(newest, wanted.version)  # a target never goes back
        wanted = wanted._replace(version=newest)
        match event:
            case "is lost":
                engine = changed(engine, Trigger.LOST)
            case "is rerouted":
                engine = changed(engine, Trigger.REROUTED)
            case "is quarantined" if engine.accepts_requests:
                engine = changed(engine, Trigger.QUARANTINED)
            case "fails":
                engine = changed(engine, Trigger.REFUSED, is_found=False, stage=UpdateStage.NONE)
            case _:
                pass
        assert engine.is_found or next_step(wanted, engine) is NextStep.FIND
        step, served = next_step(wanted, engine), engine.accepts_requests
        if step is NextStep.REGISTER:
            assert engine.version == newest > 0
        if step is NextStep.VERIFY:
            assert (engine.stage, engine.room) == (RESUMED, EVERYTHING)
        engine = after(step, wanted, engine)
        assert served or step is NextStep.REGISTER or not engine.accepts_requests
        assert not engine.accepts_requests or (engine.version > 0 and engine.room is EVERYTHING)
