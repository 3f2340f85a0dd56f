"""Completed groups that a batch can still take, for readers that keep completions without the ledger. Pure."""

import msgspec

from messages import GroupsClosed, Message, Outcome, VerdictGiven
from runtime.ledger.steps import StepChange, TakenBack


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Groups and completions that no batch can take any more. A completion is the log sequence of its event."""

    group_ids: tuple[int, ...] = ()
    event_seqs: tuple[int, ...] = ()


NOTHING = Ended()


def ended_by(event: Message) -> Ended:
    """Groups and completions that an event ends.

    A verdict that is not the first one of its group ends nothing; a reader that acted on it must read again.
    """
    match event:
        case GroupsClosed():
            return Ended(group_ids=event.group_ids)
        case VerdictGiven() if event.outcome is not Outcome.KEEP:
            return Ended(event_seqs=(event.event_seq,))
        case _:
            return NOTHING


def kept_by(event: Message) -> tuple[int, ...]:
    """Completions that an event allows in a batch, by log sequence. Only the first verdict counts."""
    return (event.event_seq,) if isinstance(event, VerdictGiven) and event.outcome is Outcome.KEEP else ()


def lost_by(change: StepChange) -> Ended:
    """The completions whose payloads are lost."""
    return Ended(event_seqs=tuple(ref.event_seq for ref in change.lost)) if isinstance(change, TakenBack) else NOTHING
