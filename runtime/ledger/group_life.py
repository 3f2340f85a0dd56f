"""One prompt group's whole life, as its log says it. Pure."""

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    PayloadsMissing,
    RolloutRequested,
    SegmentsSpilled,
    TrainerStarted,
    VerdictGiven,
)
from messages.subjects import key_of


class GroupLife:
    """Finds in the log every event that speaks of one prompt group."""

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self._steps: set[int] = set()  # of the batches that hold it
        self._trained = False

    def take(self, event: Message) -> Message | None:
        """The next event of the log as far as it speaks of the group, None if it does not.

        Of an event about several groups only the part about this one is left. A step that was trained is told by its
        BatchTrained, also by those of a replay; if the trainer died before it said so, by the first event that implies
        it.
        """
        match event:
            case GroupCompleted() | GroupAborted() | GroupFailed() | SegmentsSpilled() | VerdictGiven():
                return event if event.group_id == self.group_id else None
            case GroupsIssued():
                issued = tuple(group for group in event.groups if group.group_id == self.group_id)
                return msgspec.structs.replace(event, groups=issued) if issued else None
            case BatchReady():
                refs = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
                passed_over = tuple(group_id for group_id in event.passed_over if group_id == self.group_id)
                if refs:
                    self._steps.add(event.step)
                own = msgspec.structs.replace(event, groups=refs, passed_over=passed_over)
                return own if refs or passed_over else None
            case PayloadsMissing():
                return self._take_back(event) if event.step in self._steps and not self._trained else None
            case GroupsClosed():
                known = self.group_id in event.group_ids
                return msgspec.structs.replace(event, group_ids=(self.group_id,)) if known else None
            case MessageDeadLettered():
                task = (key_of(event.subject, RolloutRequested) or "").partition(".")[0]
                return event if task == str(self.group_id) else None
            case BatchTrained():
                return self._settle(event) if event.step in self._steps else None
            case TrainerStarted():
                return self._settle_untold(event, event.step)
            case CheckpointSaved():
                return self._settle_untold(event, event.oldest_step)
            case _:
                return None

    def _settle(self, event: Message) -> Message:
        self._trained = True
        return event

    def _take_back(self, event: PayloadsMissing) -> Message:
        self._steps.remove(event.step)
        lost = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
        return msgspec.structs.replace(event, groups=lost)

    def _settle_untold(self, event: Message, below_step: int) -> Message | None:
        implied = not self._trained and any(step < below_step for step in self._steps)
        return self._settle(event) if implied else None
