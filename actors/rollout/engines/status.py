"""The status of an engine, what changes it, and the engine's next step. Pure; engine.py carries the steps out.

All kinds of engines and all weight transports follow the same steps. The one loop per engine is in fleet.py: it carries
out the next step, looks again, and decides what follows a failed one (failures.py).
"""

from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

from messages import EngineState

STARTING, CURRENT, UPDATING = EngineState.STARTING, EngineState.CURRENT, EngineState.UPDATING
PAUSED, RELEASED = EngineState.PAUSED, EngineState.RELEASED
SUSPECT, GONE, QUARANTINED = EngineState.SUSPECT, EngineState.GONE, EngineState.QUARANTINED
LOST: Final = (GONE, SUSPECT)


class MemoryLevel(IntEnum):
    """Level of the memory that an engine shares with the trainer (colocation); each level includes the lower ones."""

    NOTHING = 0
    WEIGHTS = 1  # memory for weights, not filled yet
    LOADED = 2  # the target weights, verified as far as possible without generating
    EVERYTHING = 3  # memory for the KV cache too: it may be marked ready


class UpdateStage(Enum):
    """What an engine's weight update has done."""

    NONE = "none"  # there is no update
    LOADED = "loaded"  # it holds the weights, and generates nothing until it continues
    RESUMED = "resumed"  # it generates; its tokens wait for the verification


class EngineStatus(NamedTuple):
    """All that the run knows of one engine, except its requests. `changed` returns the next one."""

    state: EngineState = STARTING
    reason: str = ""  # why it is in its state
    answers: bool = False  # it has responded since it was last down
    is_found: bool = False  # it answers, fits the recipe, and its memory is known; no failure since
    room: MemoryLevel = MemoryLevel.EVERYTHING  # of the memory that it has: never LOADED
    stage: UpdateStage = UpdateStage.NONE
    version: int = 0  # verified weights; 0: none
    label: str = ""  # of these weights
    pause_s: float = 0.0  # seconds that it was paused for them
    updated_at: float = 0.0  # time of their verification
    failed_version: int = 0  # the last version that it failed to load, or that could not be supplied
    num_quarantines: int = 0
    retried_at: float = 0.0  # when the quarantine ends

    @property
    def accepts_requests(self) -> bool:
        """Whether it accepts requests: it is current and registered where requests go."""
        return accepts_requests(self.state)

    @property
    def memory_level(self) -> MemoryLevel:
        """The level of its memory: what it has room for, and whether that is filled."""
        if self.room is MemoryLevel.NOTHING or (self.accepts_requests and self.room is MemoryLevel.EVERYTHING):
            return self.room
        is_loaded = self.version > 0 or self.stage is UpdateStage.RESUMED
        return MemoryLevel.LOADED if is_loaded else MemoryLevel.WEIGHTS


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
    Trigger.RELEASED: {STARTING: RELEASED, CURRENT: RELEASED, UPDATING: RELEASED},
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


def changed(status: EngineStatus, trigger: Trigger | None, reason: str = "", **news: Any) -> EngineStatus:
    """Return the status of an engine after a trigger. An engine that is lost or stops to serve is to be found again.

    Args:
        status: before it.
        trigger: None: its state stays.
        reason: why its state changes.
        news: other fields that are known now.
    """
    new = status._replace(**news)
    if trigger is None:
        return new
    state = next_state(status.state, trigger)
    if state is not status.state:
        new = new._replace(state=state, reason=reason)
    if state in LOST:
        new = new._replace(answers=False)
    if state in (*LOST, PAUSED) or (status.accepts_requests and not new.accepts_requests):
        new = new._replace(is_found=False)
    return new


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


class NextStep(Enum):
    """What an engine has to do next. Each step ends by itself, is limited in time, or ends at a change of its target.

    A released memory or an update may wait for the trainer, which leads the phases and weight syncs.
    """

    FIND = "find"  # wait until it answers, resume it if it is paused, compare it with the recipe, learn its memory
    GIVE_BACK = "give back"  # release its memory to the trainer; limit: that of each call
    TAKE_WEIGHTS = "take weights"  # resume memory for weights; limit: that of the call
    LOAD = "load"  # pause it, load, compare checksums; limits: update_stall_s, min_load_mb_per_s
    RESUME = "resume"  # let it generate again; limit: that of each call
    TAKE_REST = "take rest"  # resume all other memory; limit: that of the call
    VERIFY = "verify"  # compare what it generates with the probe, and its files; limit: that of each call
    REGISTER = "register"  # make it known to the router, and accept requests; limit: REGISTER_TIMEOUT_S
    WAIT = "wait"  # until a change makes another step the next one


class Wanted(NamedTuple):
    """What is wanted of an engine."""

    version: int  # target weights; 0: none were announced yet
    memory: MemoryLevel  # allowed level of the memory that engines share with the trainer
    apart: bool = False  # an isolation run or a rolling update keeps it from being registered


def next_step(wanted: Wanted, engine: EngineStatus) -> NextStep:
    """Return an engine's next step. Only REGISTER makes it accept requests, and only with verified target weights.

    An update that was begun is carried on, whatever is announced meanwhile. FIND and GIVE_BACK abandon it.
    """
    if not engine.is_found:
        return NextStep.FIND
    if engine.stage is UpdateStage.LOADED:
        return NextStep.RESUME
    if wanted.memory is MemoryLevel.NOTHING:
        return NextStep.WAIT if engine.room is MemoryLevel.NOTHING else NextStep.GIVE_BACK
    if engine.room is MemoryLevel.NOTHING:
        return NextStep.TAKE_WEIGHTS
    has_all, may_have_all = engine.room is MemoryLevel.EVERYTHING, wanted.memory is MemoryLevel.EVERYTHING
    if engine.stage is UpdateStage.RESUMED:
        if has_all:
            return NextStep.VERIFY
        return NextStep.TAKE_REST if may_have_all else NextStep.WAIT
    serves = engine.accepts_requests
    if wanted.memory is MemoryLevel.WEIGHTS or wanted.version == 0 or (wanted.apart and not serves):
        return NextStep.WAIT
    if engine.version < wanted.version:
        return NextStep.LOAD
    if serves or not may_have_all:
        return NextStep.WAIT
    return NextStep.REGISTER if has_all else NextStep.TAKE_REST
