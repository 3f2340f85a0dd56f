"""The current colocation phase, folded from the log, for the trainer that leads and for followers. Pure."""

import msgspec

from messages import Phase, PhaseChanged


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The current phase."""

    phase: Phase
    incarnation: int  # of the trainer that started the phase
    step: int
    seq: int  # log sequence of its PhaseChanged


def next_turn(turn: Turn | None, event: PhaseChanged, seq: int) -> Turn | None:
    """The phase after an event. Events of a replaced trainer change nothing."""
    if turn is not None and event.incarnation < turn.incarnation:
        return turn
    return Turn(phase=event.phase, incarnation=event.incarnation, step=event.step, seq=seq)
