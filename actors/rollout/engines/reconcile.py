"""The next step of an engine, from what is wanted of it and what it has. Pure; engine.py carries the steps out.

All kinds of engines and all weight transports follow the same steps. The one loop per engine is in fleet.py: it carries
out the next step, looks again, and decides what follows a failed one (refusing.py).
"""

from enum import Enum
from typing import NamedTuple

from actors.rollout.engines.memory.levels import MemoryLevel
from actors.rollout.engines.states import accepts_requests
from messages import EngineState


class NextStep(Enum):
    """What an engine has to do next. Each step ends by itself, is limited in time, or ends at a change of its target.

    A released memory or an update may wait for the trainer, which leads the phases and weight syncs.
    """

    FIND = "find"  # wait until it answers, resume it if it is paused, compare it with the recipe, learn its memory
    GIVE_BACK = "give back"  # release its memory to the trainer; limit: that of each call
    TAKE_WEIGHTS = "take weights"  # resume memory for weights; limit: that of the call
    UPDATE = "update"  # pause, load, verify, resume; limits: update_stall_s, min_load_mb_per_s
    TAKE_REST = "take rest"  # resume all other memory; limit: that of the call
    REGISTER = "register"  # make it known to the router, and accept requests; limit: REGISTER_TIMEOUT_S
    WAIT = "wait"  # until a change makes another step the next one


class Wanted(NamedTuple):
    """What is wanted of all engines of a rollout actor."""

    version: int  # target weights; 0: none were announced yet
    memory: MemoryLevel  # allowed level of the memory that engines share with the trainer


class Actual(NamedTuple):
    """What one engine has."""

    state: EngineState
    is_found: bool  # it answers, fits the recipe, and its memory is known; no failure since
    version: int  # verified weights; 0: none
    room: MemoryLevel  # level of its memory
    is_apart: bool = False  # an isolation run or a rolling update keeps it from being registered


def next_step(wanted: Wanted, actual: Actual) -> NextStep:
    """Return an engine's next step. Only REGISTER makes it accept requests, and only with verified target weights."""
    serves = accepts_requests(actual.state)
    if not actual.is_found:
        return NextStep.FIND
    if wanted.memory is MemoryLevel.NOTHING:
        return NextStep.WAIT if actual.room is MemoryLevel.NOTHING else NextStep.GIVE_BACK
    if actual.room is MemoryLevel.NOTHING:
        return NextStep.TAKE_WEIGHTS
    if wanted.memory is MemoryLevel.WEIGHTS or wanted.version == 0 or (actual.is_apart and not serves):
        return NextStep.WAIT
    if actual.version < wanted.version:
        return NextStep.UPDATE
    if serves or wanted.memory is not MemoryLevel.EVERYTHING:
        return NextStep.WAIT
    return NextStep.REGISTER if actual.room is MemoryLevel.EVERYTHING else NextStep.TAKE_REST
