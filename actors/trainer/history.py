"""What the trainer knows from the run's log: a fold over events, without clock, bus or payloads."""

from collections.abc import Iterable
from typing import Final

from messages import (
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupsClosed,
    Message,
    Outcome,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)

HISTORY: Final[tuple[type[Message], ...]] = (
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupsClosed,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
MAX_WAITING_GROUPS: Final = 8192  # beyond, the oldest are forgotten and read from the log again when a batch cites them


class History:
    """The state after the events folded so far."""

    def __init__(self) -> None:
        self.frontier = 0  # train steps that were ever done
        self.incarnation = 0  # highest seen
        self.incarnation_seq = 0  # of the event that brought it
        self.version = 0  # highest announced
        self.confirmed = 0  # highest that an engine holds
        self.steps_of_versions: dict[int, int] = {}  # train steps that an announced version contains
        self.batches: dict[int, BatchReady] = {}  # by step, of steps from `settled` on
        self.settled = 0  # batches below are not needed any more
        self.completed: dict[int, GroupCompleted] = {}  # by log sequence, waiting for a batch or in one that waits
        self._seqs_of_groups: dict[int, list[int]] = {}

    def fold(self, event: Message, seq: int) -> None:
        """Take in the event at a log sequence. Events come in the order of the log."""
        match event:
            case GroupCompleted():
                self.completed[seq] = event
                self._seqs_of_groups.setdefault(event.group_id, []).append(seq)
                self._bound()
            case GroupsClosed():
                self._forget(event.group_ids)
            case VerdictGiven() if event.outcome is not Outcome.KEEP:
                self._forget_one(event.event_seq)  # read again should an earlier verdict have kept it
            case BatchReady():
                self.batches.setdefault(event.step, event)
                self.settle(self.settled)
            case BatchTrained():
                self.frontier = max(self.frontier, event.step + 1)
            case TrainerStarted() if event.incarnation > self.incarnation:
                self.incarnation, self.incarnation_seq = event.incarnation, seq
            case WeightsAnnounced():
                self.version = max(self.version, event.version)
                self.steps_of_versions[event.version] = event.step
            case WeightsApplied():
                self.confirmed = max(self.confirmed, event.version)
            case _:
                pass

    def settle(self, step: int) -> None:
        """Forget batches below a step: no checkpoint of this process goes back behind it."""
        self.settled = max(self.settled, step)
        for number in [number for number in self.batches if number < self.settled]:
            self._forget(ref.group_id for ref in self.batches.pop(number).groups)

    def _forget(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            for seq in self._seqs_of_groups.pop(group_id, ()):
                self.completed.pop(seq, None)

    def _forget_one(self, seq: int) -> None:
        event = self.completed.pop(seq, None)
        if event is not None:
            seqs = self._seqs_of_groups[event.group_id]
            seqs.remove(seq)
            if not seqs:
                del self._seqs_of_groups[event.group_id]

    def _bound(self) -> None:
        while len(self.completed) > MAX_WAITING_GROUPS:
            self._forget_one(next(iter(self.completed)))
