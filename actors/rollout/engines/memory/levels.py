"""The memory levels of colocated engines: the allowed level of each phase, and when a phase is complete. Pure."""

from enum import IntEnum
from typing import Final

from messages import Phase


class MemoryLevel(IntEnum):
    """Memory level of an engine; each level includes the lower ones."""

    NOTHING = 0
    WEIGHTS = 1  # memory for weights, not filled yet
    LOADED = 2  # the target weights, verified as far as possible without generating
    EVERYTHING = 3  # memory for the KV cache too: it may be marked ready


LEVEL_OF: Final = {
    Phase.GENERATE: MemoryLevel.EVERYTHING,
    Phase.RELEASE: MemoryLevel.NOTHING,
    Phase.TRAIN: MemoryLevel.NOTHING,
    Phase.OFFLOAD: MemoryLevel.NOTHING,
    Phase.RESUME_WEIGHTS: MemoryLevel.WEIGHTS,
    Phase.UPDATE: MemoryLevel.LOADED,
    Phase.RESUME_KV: MemoryLevel.EVERYTHING,
}
SENDS: Final = frozenset({Phase.GENERATE, Phase.RESUME_KV})  # phases in which ready engines get requests


def is_there(memory_level: MemoryLevel, wanted: MemoryLevel) -> bool:
    """Whether an engine has reached the wanted level. NOTHING must be reached exactly, other levels may be exceeded."""
    return memory_level is MemoryLevel.NOTHING if wanted is MemoryLevel.NOTHING else memory_level >= wanted


def is_awaited(wanted: MemoryLevel, *, answers: bool) -> bool:
    """Whether a phase waits for an engine.

    A phase with level NOTHING waits for all engines: one that is down may be starting and take memory.
    """
    return answers or wanted is MemoryLevel.NOTHING
