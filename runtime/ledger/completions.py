"""Which completed groups a batch can take, and which no more, for whoever keeps them and folds just that. Pure."""

import msgspec

from messages import GroupsClosed, Message, Outcome, VerdictGiven
from runtime.ledger.steps import StepChange, TakenBack


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are over, and completions that are: by the log sequence of their event."""

    group_ids: tuple[int, ...] = ()
    event_seqs: tuple[int, ...] = ()


NOTHING = Over()


def over_by(event: Message) -> Over:
    """What an event ends. A verdict that is not the first one ends nothing; who believes it has to read again."""
    match event:
        case GroupsClosed():
            return Over(group_ids=event.group_ids)
        case VerdictGiven() if event.outcome is not Outcome.KEEP:
            return Over(event_seqs=(event.event_seq,))
        case _:
            return NOTHING


def kept_by(event: Message) -> tuple[int, ...]:
    """The completions, by log sequence, of which an event says that a batch may take them; an earlier one may not."""
    return (event.event_seq,) if isinstance(event, VerdictGiven) and event.outcome is Outcome.KEEP else ()


def lost_by(change: StepChange) -> Over:
    """The completions whose payloads are gone."""
    return Over(event_seqs=tuple(ref.event_seq for ref in change.lost)) if isinstance(change, TakenBack) else NOTHING
