"""What changes the state of an engine, and what may be done to one in it. Pure; the IO is in engine.py."""

from enum import Enum
from typing import Final

from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE, QUARANTINED = EngineState.SUSPECT, EngineState.GONE, EngineState.QUARANTINED


class Happening(Enum):
    """What happens to an engine."""

    ADMITTED = "admitted"  # it proved to hold the target weights, and the router knows it
    UPDATE_BEGAN = "update began"
    UPDATED = "updated"
    REFUSED = "refused"  # weights that were newer than its own; while it is current, its node has no copy of them
    REROUTED = "rerouted"  # its router was lost, or lost it
    LEFT_PAUSED = "left paused"  # we paused it, and it could not be told to go on
    CONTINUED = "continued"
    RELEASED = "released"
    RESUMED = "resumed"
    STALLED = "stalled"  # it has requests of ours, or weights to load, and makes nothing of them
    MOVED = "moved"  # it makes tokens again
    CONDEMNED = "condemned"  # its answers cannot be used, and no other engine's: it is to be restarted
    QUARANTINED = "quarantined"  # its answers cannot be used, those of others can
    TRIED_AGAIN = "tried again"
    LOST = "lost"
    FOUND = "found"


class ImpossibleTransition(ValueError):
    """Something is said to have happened that cannot in that state: a defect of ours."""


_NEXT: Final[dict[Happening, dict[EngineState, EngineState]]] = {
    Happening.ADMITTED: {STARTING: CURRENT},
    Happening.UPDATE_BEGAN: {CURRENT: UPDATING},
    Happening.UPDATED: {UPDATING: CURRENT},
    Happening.REFUSED: {UPDATING: STARTING, STARTING: STARTING, CURRENT: STARTING},
    Happening.REROUTED: {CURRENT: STARTING, UPDATING: STARTING},
    Happening.LEFT_PAUSED: {STARTING: PAUSED, CURRENT: PAUSED, UPDATING: PAUSED},
    Happening.CONTINUED: {PAUSED: STARTING},
    Happening.RELEASED: {STARTING: RELEASED, CURRENT: RELEASED},
    Happening.RESUMED: {RELEASED: STARTING},
    Happening.STALLED: {STARTING: SUSPECT, CURRENT: SUSPECT, UPDATING: SUSPECT, RELEASED: SUSPECT},
    Happening.MOVED: {SUSPECT: STARTING},
    Happening.CONDEMNED: {CURRENT: SUSPECT, UPDATING: SUSPECT},
    Happening.QUARANTINED: {CURRENT: QUARANTINED, UPDATING: QUARANTINED},
    Happening.TRIED_AGAIN: {QUARANTINED: STARTING},
    Happening.LOST: {state: GONE for state in EngineState},
    Happening.FOUND: {GONE: STARTING},
}
# An update, its requests and its look at the engine end by themselves, whatever has become of the engine by then.
_LATE: Final = {Happening.UPDATED, Happening.REFUSED, Happening.REROUTED, Happening.LEFT_PAUSED}
_UPDATES: Final = {(CURRENT, UPDATING), (UPDATING, CURRENT)}


def next_state(state: EngineState, happening: Happening) -> EngineState:
    """The state of an engine after something happened to it.

    Raises:
        ImpossibleTransition: that cannot happen in this state.
    """
    after = _NEXT[happening].get(state)
    if after is None and happening not in _LATE:
        raise ImpossibleTransition(f"{happening.value}: not in state {state}")
    return after or state


def is_told(old: EngineState, new: EngineState) -> bool:
    """Whether a change of state is an event: an update is told by weights.applied."""
    return old is not new and (old, new) not in _UPDATES


def is_asked(state: EngineState) -> bool:
    """Whether requests may be sent to it."""
    return state in (CURRENT, UPDATING)


def may_continue(state: EngineState, *, ours: bool, paused_by_us: bool) -> bool:
    """Whether a pause of it may be ended: one of ours, which is each of an engine that the run started.

    Args:
        state: of the engine.
        ours: the run started it, so that nobody but an earlier rollout actor of the run paused it.
        paused_by_us: it is noted that a rollout actor of the run paused it.
    """
    return state is PAUSED or (state in (STARTING, GONE) and (ours or paused_by_us))
