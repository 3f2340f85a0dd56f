"""Colocation phases: their order, and the recovery from a crash in each. Pure; the calls are in turns.py."""

from enum import Enum
from typing import Final

from messages import Phase

ORDER: Final = tuple(Phase)
CALLED: Final = frozenset({Phase.RELEASE, Phase.RESUME_WEIGHTS, Phase.UPDATE, Phase.RESUME_KV})
TRAINS: Final = frozenset({Phase.TRAIN, Phase.OFFLOAD})  # the trainer holds memory that engines need
GENERATES: Final = frozenset(Phase) - TRAINS  # engines may hold memory that the trainer needs to train


class Victim(Enum):
    """Process that crashes."""

    TRAINER = "trainer"  # any rank: all ranks restart together
    ROLLOUT = "rollout actor"
    ENGINE = "engine"


class Remedy(Enum):
    """Recovery from a crash."""

    BEGINS_WITH_RELEASE = "its next incarnation has the engines give their memory back before it builds its model"
    READS_THE_LOG = "the next one reads the phase from the log, and brings its engines there"
    IS_ASKED_AGAIN = "the same, and it is asked until it answers"
    COMES_BACK = "it is admitted as after any start"
    IS_AWAITED = "it gives back its memory as soon as it is up, before anything else; the phase waits for that"
    GIVES_BACK = "it gives back its memory as soon as it is up, before anything else; nobody waits for it"
    CATCHES_UP = "it is brought where the others are as soon as it is up; nobody waits for it"


_OF_ROLLOUT: Final = {phase: Remedy.IS_ASKED_AGAIN if phase in CALLED else Remedy.READS_THE_LOG for phase in Phase}
REMEDIES: Final[dict[Victim, dict[Phase, Remedy]]] = {
    Victim.TRAINER: dict.fromkeys(Phase, Remedy.BEGINS_WITH_RELEASE),
    Victim.ROLLOUT: _OF_ROLLOUT,
    Victim.ENGINE: {
        Phase.GENERATE: Remedy.COMES_BACK,
        Phase.RELEASE: Remedy.IS_AWAITED,
        Phase.TRAIN: Remedy.GIVES_BACK,
        Phase.OFFLOAD: Remedy.GIVES_BACK,
        Phase.RESUME_WEIGHTS: Remedy.CATCHES_UP,
        Phase.UPDATE: Remedy.CATCHES_UP,
        Phase.RESUME_KV: Remedy.CATCHES_UP,
    },
}


def next_phase(phase: Phase) -> Phase:
    """Return the phase after this one."""
    return ORDER[(ORDER.index(phase) + 1) % len(ORDER)]


def first_phase(*, is_first_start: bool) -> Phase:
    """Return the first phase of a trainer incarnation, whatever the last phase in the log is.

    A new run needs no release phase. Each engine releases the memory that its start took, and no phase has given it
    memory to generate with.
    """
    return Phase.TRAIN if is_first_start else Phase.RELEASE


def must_all_answer(phase: Phase) -> bool:
    """Whether every rollout actor must reach a phase, because otherwise the trainer has no memory.

    In all other phases memory is free. A rollout actor that does not answer in time follows the log.
    """
    return phase is Phase.RELEASE
