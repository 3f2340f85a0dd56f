"""The history of one prompt group, extracted from the log. Pure."""

from collections.abc import Iterable

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    PayloadsMissing,
    RolloutRequested,
    SegmentsSpilled,
    VerdictGiven,
)
from messages.subjects import key_of
from runtime.ledger.changes import Change, Judged
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.steps import Settled, TakenBack


class GroupLife:
    """Finds all events of the log that concern one prompt group."""

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.kept_without_verdict = False  # whether the newest event kept it, in a run without a filter
        self._ledger = LedgerState()
        self._steps: set[int] = set()  # steps that trained it; a replay trains them again

    def take(self, event: Message, seq: int) -> Message | None:
        """Return the next event of the log, reduced to this group; None if it does not concern the group.

        A trained step shows as its BatchTrained, including those of replays. If the trainer died before it wrote one,
        the step shows as the first event that implies it.

        Args:
            event: any event of the log.
            seq: its sequence in the log.
        """
        changes = fold(self._ledger, event, seq) if isinstance(event, LEDGER_EVENTS) else ()
        implied = any(self._is_settled_by(change) for change in changes)
        self.kept_without_verdict = not isinstance(event, VerdictGiven) and any(map(self._is_kept_by, changes))
        match event:
            case GroupCompleted() | GroupAborted() | GroupFailed() | SegmentsSpilled() | VerdictGiven():
                return event if event.group_id == self.group_id else None
            case GroupsIssued():
                issued = tuple(group for group in event.groups if group.group_id == self.group_id)
                return msgspec.structs.replace(event, groups=issued) if issued else None
            case BatchReady():
                refs = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
                passed_over = tuple(group_id for group_id in event.passed_over if group_id == self.group_id)
                own = msgspec.structs.replace(event, groups=refs, passed_over=passed_over)
                return own if refs or passed_over else None
            case PayloadsMissing():
                lost = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
                own = msgspec.structs.replace(event, groups=lost)
                return own if any(self._is_taken_back_by(change) for change in changes) else None
            case GroupsClosed():
                known = self.group_id in event.group_ids
                return msgspec.structs.replace(event, group_ids=(self.group_id,)) if known else None
            case MessageDeadLettered():
                task = (key_of(event.subject, RolloutRequested) or "").partition(".")[0]
                return event if task == str(self.group_id) else None
            case BatchTrained():
                counts = event.step in self._steps and not self._ledger.is_replaced(event)
                return self._own_of(event) if counts else None
            case _:
                return event if implied or self.kept_without_verdict else None

    def _own_of(self, event: BatchTrained) -> BatchTrained:
        untrained = tuple(item for item in event.untrained if item.group_id == self.group_id)
        skipped = tuple(group_id for group_id in event.skipped_groups if group_id == self.group_id)
        return msgspec.structs.replace(event, untrained=untrained, skipped_groups=skipped)

    def _is_settled_by(self, change: Change) -> bool:
        if not isinstance(change, Settled) or not self._is_in(change.groups):
            return False
        self._steps.add(change.step)
        return True

    def _is_taken_back_by(self, change: Change) -> bool:
        return isinstance(change, TakenBack) and self._is_in(change.groups)

    def _is_kept_by(self, change: Change) -> bool:
        return isinstance(change, Judged) and change.group.group_id == self.group_id

    def _is_in(self, groups: Iterable[GroupRef]) -> bool:
        return any(ref.group_id == self.group_id for ref in groups)
