"""Whose turn it is, as the log says: for the trainer that leads the phases, and for who follows them. Pure."""

import msgspec

from messages import Phase, PhaseChanged


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The phase that holds now."""

    phase: Phase
    incarnation: int  # of the trainer that began it
    step: int
    seq: int  # log sequence of the event that said so


def next_turn(turn: Turn | None, event: PhaseChanged, seq: int) -> Turn | None:
    """What holds after an event; one of a trainer that was replaced changes nothing."""
    if turn is not None and event.incarnation < turn.incarnation:
        return turn
    return Turn(phase=event.phase, incarnation=event.incarnation, step=event.step, seq=seq)
