"""Colocation phases and their order. Pure; the calls are in colocation.py."""

from typing import Final

from messages import Phase

ORDER: Final = tuple(Phase)
CALLED: Final = frozenset({Phase.RELEASE, Phase.RESUME_WEIGHTS, Phase.UPDATE, Phase.RESUME_KV})


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
