"""The current colocation phase, folded from the log, for the trainer that leads and for followers. Pure."""

import msgspec

from messages import Phase, PhaseChanged


class CurrentPhase(msgspec.Struct, frozen=True, kw_only=True):
    """The current phase."""

    phase: Phase
    incarnation: int  # of the trainer that started the phase
    step: int
    seq: int  # log sequence of its PhaseChanged


def fold_phase(current: CurrentPhase | None, event: PhaseChanged, seq: int) -> CurrentPhase | None:
    """The phase after an event. Events of a replaced trainer change nothing."""
    if current is not None and event.incarnation < current.incarnation:
        return current
    return CurrentPhase(phase=event.phase, incarnation=event.incarnation, step=event.step, seq=seq)
