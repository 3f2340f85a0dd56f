"""What an event of the log changed: `fold` returns it, and whoever wants to know of groups listens to that."""

import msgspec

from messages import GroupAborted, GroupCompleted, GroupFailed, Outcome
from runtime.ledger.state import Group
from runtime.ledger.steps import Settled, TakenBack


class Issued(msgspec.Struct, frozen=True):
    """Groups are to be generated, for the first time or again."""

    groups: tuple[Group, ...]


class AttemptEnded(msgspec.Struct, frozen=True):
    """The first ending of an attempt; what comes later of it changes nothing."""

    group: Group
    event: GroupCompleted | GroupAborted | GroupFailed


class Judged(msgspec.Struct, frozen=True):
    """The first verdict on a completed group."""

    group: Group
    outcome: Outcome
    reason: str | None  # the filter's


class Closed(msgspec.Struct, frozen=True):
    """A group is given up: no further attempt, no batch."""

    group: Group
    reason: str


class Batched(msgspec.Struct, frozen=True):
    """A batch is made."""

    step: int
    groups: tuple[Group, ...]
    passed_over: tuple[Group, ...]  # kept too, or spare; they are to be closed


Change = Issued | AttemptEnded | Judged | Closed | Batched | Settled | TakenBack
