"""The state machine of an engine, and what each state permits. Pure; the IO is in engine.py."""

from enum import Enum
from typing import Final

from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE, QUARANTINED = EngineState.SUSPECT, EngineState.GONE, EngineState.QUARANTINED


class Trigger(Enum):
    """Triggers of engine state transitions."""

    ADMITTED = "admitted"  # it holds verified target weights and is registered at the router
    UPDATE_BEGAN = "update began"
    UPDATED = "updated"
    REFUSED = "refused"  # it refused newer weights; in state CURRENT: its node has no copy of them
    REROUTED = "rerouted"  # the router went down or no longer lists it
    LEFT_PAUSED = "left paused"  # paused by the run; the call to continue failed
    CONTINUED = "continued"
    RELEASED = "released"
    RESUMED = "resumed"
    STALLED = "stalled"  # makes no progress on the requests or the weight update of this run
    MOVED = "moved"  # it generates tokens again
    CONDEMNED = "condemned"  # its answers are unusable and no other engine answers well: restart it
    QUARANTINED = "quarantined"  # its answers are unusable, those of other engines are usable
    TRIED_AGAIN = "tried again"
    LOST = "lost"
    FOUND = "found"


class ImpossibleTransition(ValueError):
    """A trigger that the current state does not allow: a bug in this code."""


_NEXT: Final[dict[Trigger, dict[EngineState, EngineState]]] = {
    Trigger.ADMITTED: {STARTING: CURRENT},
    Trigger.UPDATE_BEGAN: {CURRENT: UPDATING},
    Trigger.UPDATED: {UPDATING: CURRENT},
    Trigger.REFUSED: {UPDATING: STARTING, STARTING: STARTING, CURRENT: STARTING},
    Trigger.REROUTED: {CURRENT: STARTING, UPDATING: STARTING},
    Trigger.LEFT_PAUSED: {STARTING: PAUSED, CURRENT: PAUSED, UPDATING: PAUSED},
    Trigger.CONTINUED: {PAUSED: STARTING},
    Trigger.RELEASED: {STARTING: RELEASED, CURRENT: RELEASED},
    Trigger.RESUMED: {RELEASED: STARTING},
    Trigger.STALLED: {STARTING: SUSPECT, CURRENT: SUSPECT, UPDATING: SUSPECT, RELEASED: SUSPECT},
    Trigger.MOVED: {SUSPECT: STARTING},
    Trigger.CONDEMNED: {CURRENT: SUSPECT, UPDATING: SUSPECT},
    Trigger.QUARANTINED: {CURRENT: QUARANTINED, UPDATING: QUARANTINED},
    Trigger.TRIED_AGAIN: {QUARANTINED: STARTING},
    Trigger.LOST: {state: GONE for state in EngineState},
    Trigger.FOUND: {GONE: STARTING},
}
# Updates, requests and health checks end on their own; the engine may be in any state by then.
_LATE: Final = {Trigger.UPDATED, Trigger.REFUSED, Trigger.REROUTED, Trigger.LEFT_PAUSED}
_UPDATES: Final = {(CURRENT, UPDATING), (UPDATING, CURRENT)}


def next_state(state: EngineState, trigger: Trigger) -> EngineState:
    """Return the state of an engine after a trigger.

    Raises:
        ImpossibleTransition: the trigger is not allowed in this state.
    """
    after = _NEXT[trigger].get(state)
    if after is None and trigger not in _LATE:
        raise ImpossibleTransition(f"trigger {trigger.value!r} is not allowed in state {state}")
    return after or state


def is_published(old: EngineState, new: EngineState) -> bool:
    """Whether a state change is published as an event. Updates are not: weights.applied reports them."""
    return old is not new and (old, new) not in _UPDATES


def accepts_requests(state: EngineState) -> bool:
    """Whether an engine in this state accepts requests."""
    return state in (CURRENT, UPDATING)


def may_continue(state: EngineState, *, ours: bool, paused_by_us: bool) -> bool:
    """Whether the rollout actor may end an engine's pause.

    Any pause of an engine started by the run may be ended. A pause of an external engine only if the run paused it.

    Args:
        state: of the engine.
        ours: the run started it, so only an earlier rollout actor of the run can have paused it.
        paused_by_us: a stored note says that a rollout actor of the run paused it.
    """
    return state is PAUSED or (state in (STARTING, GONE) and (ours or paused_by_us))
