"""The memory levels of colocated engines: the allowed level of each phase, and when a phase is complete. Pure."""

from enum import IntEnum
from typing import Final

from messages import Phase


class Stage(IntEnum):
    """Memory level of an engine; each level includes the lower ones."""

    NOTHING = 0
    WEIGHTS = 1  # memory for weights, not filled yet
    LOADED = 2  # the target weights, verified as far as possible without generating
    EVERYTHING = 3  # memory for the KV cache too: it may be marked ready


STAGE_OF: Final = {
    Phase.GENERATE: Stage.EVERYTHING,
    Phase.RELEASE: Stage.NOTHING,
    Phase.TRAIN: Stage.NOTHING,
    Phase.OFFLOAD: Stage.NOTHING,
    Phase.RESUME_WEIGHTS: Stage.WEIGHTS,
    Phase.UPDATE: Stage.LOADED,
    Phase.RESUME_KV: Stage.EVERYTHING,
}
SENDS: Final = frozenset({Phase.GENERATE, Phase.RESUME_KV})  # phases in which ready engines get requests


def is_there(stage: Stage, wanted: Stage) -> bool:
    """Whether an engine has reached a level: exactly NOTHING, or at least the wanted one."""
    return stage is Stage.NOTHING if wanted is Stage.NOTHING else stage >= wanted


def is_awaited(wanted: Stage, *, answers: bool) -> bool:
    """Whether a phase waits for an engine.

    A phase with level NOTHING waits for all engines: one that is down may be starting and take memory.
    """
    return answers or wanted is Stage.NOTHING
