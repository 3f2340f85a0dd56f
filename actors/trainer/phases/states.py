"""The phases in their order, and what is done in each when somebody dies. Pure; the calls are in turns.py."""

from enum import Enum
from typing import Final

from messages import Phase

ORDER: Final = tuple(Phase)
CALLED: Final = frozenset({Phase.RELEASE, Phase.RESUME_WEIGHTS, Phase.UPDATE, Phase.RESUME_KV})
TRAINS: Final = frozenset({Phase.TRAIN, Phase.OFFLOAD})  # the trainer has memory that engines need
GENERATES: Final = frozenset(Phase) - TRAINS  # engines may have memory that the trainer needs to train


class Victim(Enum):
    """Who dies."""

    TRAINER = "trainer"  # a rank of it, so that all begin again
    ROLLOUT = "rollout actor"
    ENGINE = "engine"


class Remedy(Enum):
    """What is done."""

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
    """The one that follows."""
    return ORDER[(ORDER.index(phase) + 1) % len(ORDER)]


def first_phase(*, is_first_start: bool) -> Phase:
    """With which phase an incarnation of the trainer begins, whatever the log says of the last one.

    Of a run that begins, no engine was ever given memory to generate with: each gives back what its start took.
    """
    return Phase.TRAIN if is_first_start else Phase.RELEASE


def must_all_answer(phase: Phase) -> bool:
    """Whether a phase waits for every rollout actor, for as long as it takes: else the trainer has no memory.

    In all others memory is free, and who does not answer in time follows the log.
    """
    return phase is Phase.RELEASE
