"""Changes that `fold` returns for an event: readers learn from them what happened to groups and batches."""

import msgspec

from messages import GroupAborted, GroupCompleted, GroupFailed, Outcome
from runtime.ledger.state import Group
from runtime.ledger.steps import Settled, TakenBack


class Issued(msgspec.Struct, frozen=True):
    """Groups are issued for generation, for the first time or again."""

    groups: tuple[Group, ...]


class AttemptEnded(msgspec.Struct, frozen=True):
    """The first end of an attempt. Later events of the attempt change nothing."""

    group: Group
    event: GroupCompleted | GroupAborted | GroupFailed


class Judged(msgspec.Struct, frozen=True):
    """The first verdict on a completed group. Without a filter, completed groups are kept without a verdict."""

    group: Group
    outcome: Outcome
    reason: str | None  # the filter's reason


class Closed(msgspec.Struct, frozen=True):
    """A group is given up: it gets no further attempt and no batch."""

    group: Group
    reason: str
    is_failed: bool = False  # else it was dropped


class Batched(msgspec.Struct, frozen=True):
    """The buffer made a batch."""

    step: int
    groups: tuple[Group, ...]
    passed_over: tuple[Group, ...]  # spare groups, and kept groups that were not chosen; to be closed


Change = Issued | AttemptEnded | Judged | Closed | Batched | Settled | TakenBack
