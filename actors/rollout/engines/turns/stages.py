"""How much an engine may have in each phase, and how far it has to be before the phase is over. Pure."""

from enum import IntEnum
from typing import Final

from messages import Phase


class Stage(IntEnum):
    """What an engine may have, and what it has; each includes those before it."""

    NOTHING = 0
    WEIGHTS = 1  # room for weights, with nothing in it
    LOADED = 2  # the target weights, as far as that is proven without generating
    EVERYTHING = 3  # room for keys and values too: it may be admitted


STAGE_OF: Final = {
    Phase.GENERATE: Stage.EVERYTHING,
    Phase.RELEASE: Stage.NOTHING,
    Phase.TRAIN: Stage.NOTHING,
    Phase.OFFLOAD: Stage.NOTHING,
    Phase.RESUME_WEIGHTS: Stage.WEIGHTS,
    Phase.UPDATE: Stage.LOADED,
    Phase.RESUME_KV: Stage.EVERYTHING,
}
SENDS: Final = frozenset({Phase.GENERATE, Phase.RESUME_KV})  # requests, to engines that are admitted


def is_there(stage: Stage, wanted: Stage) -> bool:
    """Whether an engine is where a phase wants it: it has nothing, or at least so much."""
    return stage is Stage.NOTHING if wanted is Stage.NOTHING else stage >= wanted


def is_awaited(wanted: Stage, *, answers: bool) -> bool:
    """Whether a phase waits for an engine: one that is down may be starting, and take memory that is to be free."""
    return answers or wanted is Stage.NOTHING
