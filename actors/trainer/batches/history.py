"""What the trainer knows from the run's log: a fold over events, without clock, bus or payloads."""

from collections.abc import Iterable
from typing import Final

from messages import (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupsClosed,
    Message,
    Outcome,
    PayloadsMissing,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.ledger.fold import LedgerState

HISTORY: Final[tuple[type[Message], ...]] = (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupsClosed,
    PayloadsMissing,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
)
MAX_WAITING_GROUPS: Final = 8192  # beyond, the oldest are forgotten and read from the log again when a batch cites them


class History:
    """The state after the events folded so far.

    Args:
        ledger: what the log up to a snapshot folds to; the events after it are still to be folded, and before them
            those from `from_seq` on, of which only completed groups count.
    """

    def __init__(self, ledger: LedgerState | None = None) -> None:
        ledger = ledger or LedgerState()
        self.last_seq = self._covered = ledger.last_seq
        self.frontier = ledger.trained_steps  # train steps that were ever done
        self.incarnation = ledger.trainer_incarnation  # highest seen
        self.version = ledger.version  # highest announced
        self.confirmed = 0  # highest that an engine holds, of those seen; a snapshot does not know it
        self.steps_of_versions = dict(ledger.version_steps)  # train steps that an announced version contains
        self.saved_step = ledger.checkpoint_step  # train steps in the newest checkpoint that was told
        self.requested_step = 0  # newest step that a checkpoint was asked for
        self.batches = {
            step: BatchReady(incarnation=ledger.incarnation, step=step, groups=batch.groups)
            for step, batch in ledger.batches.items()
        }  # by step, of steps from `settled` on
        self.trained = {step for step, batch in ledger.batches.items() if batch.trained}  # among the batches
        self.settled = 0  # batches below are not needed any more
        self._cited = {group.event_seq for group in ledger.groups.values()}
        self._cited |= {ref.event_seq for batch in ledger.batches.values() for ref in batch.groups}
        self._cited.discard(0)
        self.completed: dict[int, GroupCompleted] = {}  # by log sequence, waiting for a batch or in one that waits
        self._seqs_of_groups: dict[int, list[int]] = {}

    @property
    def covered(self) -> int:
        """Log sequence up to which the snapshot speaks; 0: there is none."""
        return self._covered

    @property
    def from_seq(self) -> int:
        """Where to begin to read the log."""
        return min([self._covered + 1, *self._cited])

    def fold(self, event: Message, seq: int) -> None:
        """Take in the event at a log sequence. Events come in the order of the log."""
        if seq <= self._covered and not (isinstance(event, GroupCompleted) and seq in self._cited):
            return
        self.last_seq = max(self.last_seq, seq)
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
            case PayloadsMissing():
                self._take_back(event)
            case BatchTrained():
                self.frontier = max(self.frontier, event.step + 1)
                self.trained |= {event.step} & self.batches.keys()
            case TrainerStarted():
                self.incarnation = max(self.incarnation, event.incarnation)
                self.frontier = max(self.frontier, event.step)
                self.trained |= {step for step in self.batches if step < event.step}
            case CheckpointSaved():
                self.saved_step = max(self.saved_step, event.step)
                self.settle(event.oldest_step)
            case CheckpointRequested():
                self.requested_step = max(self.requested_step, event.step)
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
            self.trained.discard(number)
            self._forget(ref.group_id for ref in self.batches.pop(number).groups)

    def _take_back(self, event: PayloadsMissing) -> None:
        """As the ledger does: the batch of a step that nobody trained is dissolved, and the next one of it counts."""
        batch = self.batches.get(event.step)
        if batch is None or event.step in self.trained or not set(event.groups).intersection(batch.groups):
            return
        del self.batches[event.step]
        for ref in event.groups:
            self._forget_one(ref.event_seq)

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
