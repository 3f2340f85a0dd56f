"""Trainer's state from the run's log: a fold over events, without clock, bus or payloads."""

from collections.abc import Iterable
from typing import Final

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupsClosed,
    Message,
    PayloadsMissing,
    PhaseChanged,
    PromptsLoaded,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
    WeightsRefused,
)
from runtime.ledger.completions import Ended, ended_by, kept_by, lost_by
from runtime.ledger.phases import CurrentPhase, fold_phase
from runtime.ledger.state import LedgerState
from runtime.ledger.steps import STEP_EVENTS, Batch, StepChange, Steps, advance

HISTORY: Final[tuple[type[Message], ...]] = (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupsClosed,
    PayloadsMissing,
    PhaseChanged,
    PromptsLoaded,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
    WeightsApplied,
    WeightsRefused,
)
MAX_WAITING_GROUPS: Final = 8192  # above it the oldest are dropped, and read again when a batch cites them


class History:
    """State after the events folded so far.

    Args:
        ledger: Folded state of the log up to a snapshot. Events after the snapshot are still to be folded. From
            `from_seq` up to the snapshot, only completed groups count.
    """

    def __init__(self, ledger: LedgerState | None = None) -> None:
        ledger = ledger or LedgerState()
        self.last_seq = self._covered = ledger.last_seq
        self.version = ledger.version  # highest published
        self.confirmed = 0  # highest seen that an engine holds; not in snapshots
        self.refused = 0  # highest seen that an engine refused; not in snapshots
        self.refused_again = 0  # highest that an engine refused more than once, so that it had seconds to accept it
        self.unusable = 0  # highest whose files an engine found different from the published ones
        self.refusal = ""  # text of the newest refusal
        self.steps_of_versions = dict(ledger.version_steps)  # train steps that a published version contains
        self.current_phase: CurrentPhase | None = None  # colocation: which side has the GPUs; not in snapshots
        self.for_probe: tuple[int, ...] = ()  # tokens of the first prompts; not in snapshots
        self.requested_step = 0  # newest step of a requested checkpoint
        self._steps = Steps(
            incarnation=ledger.incarnation,
            round=ledger.round,
            taken_back=ledger.taken_back,
            lost=dict(ledger.lost),
            batches={step: msgspec.structs.replace(batch) for step, batch in ledger.batches.items()},
            trained_steps=ledger.trained_steps,
            trainer_incarnation=ledger.trainer_incarnation,
            trainer_starts=ledger.trainer_starts,
            checkpoint_step=ledger.checkpoint_step,
            gathered=ledger.gathered,
        )
        self.settled = 0  # batches of lower steps are no longer needed
        self._cited = {group.event_seq for group in ledger.groups.values()}
        self._cited |= {ref.event_seq for batch in ledger.batches.values() for ref in batch.groups}
        self._cited.discard(0)
        self.completed: dict[int, GroupCompleted] = {}  # by log sequence: no trained batch has them yet
        self.kept: dict[int, None] = {}  # completed groups that are kept, in order of their verdicts
        self._verdicts = ledger.verdicts  # whether completed groups wait for a verdict
        self._seqs_of_groups: dict[int, list[int]] = {}

    @property
    def covered(self) -> int:
        """Log sequence up to which the snapshot covers the log. 0: no snapshot."""
        return self._covered

    @property
    def from_seq(self) -> int:
        """Log sequence at which to start reading."""
        return min([self._covered + 1, *self._cited])

    @property
    def batches(self) -> dict[int, Batch]:
        """Batches by step, from step `settled` on."""
        return self._steps.batches

    @property
    def trained(self) -> set[int]:
        """Steps of trained batches."""
        return {step for step, batch in self.batches.items() if batch.trained}

    @property
    def frontier(self) -> int:
        """Highest number of completed train steps, over all incarnations of the trainer."""
        return self._steps.trained_steps

    @property
    def incarnation(self) -> int:
        """Highest trainer incarnation seen."""
        return self._steps.trainer_incarnation

    def is_replaced(self, started: TrainerStarted) -> bool:
        """Whether another trainer started after this one."""
        return self._steps.is_replaced(started)

    def fold(self, event: Message, seq: int) -> tuple[StepChange, ...]:
        """Apply the event at a log sequence, in log order. Return its changes to batches."""
        if seq <= self._covered and not (isinstance(event, GroupCompleted) and seq in self._cited):
            return ()
        self.last_seq = max(self.last_seq, seq)
        self._end(ended_by(event))
        self.kept |= dict.fromkeys(seq for seq in kept_by(event) if seq in self.completed)
        if isinstance(event, STEP_EVENTS):
            return self._advance(event)
        match event:
            case GroupCompleted():
                self._complete(event, seq)
            case BufferStarted() if event.incarnation > self._steps.incarnation:
                self._steps.incarnation, self._verdicts = event.incarnation, event.verdicts
                self.kept |= dict.fromkeys(() if event.verdicts else self.completed)
            case BatchReady():
                batch = self._steps.gather(event)
                if batch is not None and self._steps.takes_batch(batch):
                    self._steps.make(batch.step, Batch(groups=batch.groups))
                    self.settle(self.settled)
            case PromptsLoaded():
                self.for_probe = self.for_probe or event.first_ids
            case CheckpointRequested():
                self.requested_step = max(self.requested_step, event.step)
            case WeightsAnnounced():
                self.version = max(self.version, event.version)  # also of a replaced trainer: numbers are never reused
                if not self._steps.is_replaced(event):
                    self.steps_of_versions[event.version] = event.step
            case PhaseChanged() if not self._steps.is_replaced(event):
                self.current_phase = fold_phase(self.current_phase, event, seq)
            case WeightsApplied():
                self.confirmed = max(self.confirmed, event.version)
            case WeightsRefused():
                self._refuse(event)
            case _:
                pass
        return ()

    def _advance(
        self, event: BatchTrained | TrainerStarted | CheckpointSaved | PayloadsMissing
    ) -> tuple[StepChange, ...]:
        before = dict(self.batches)
        changes = advance(self._steps, event)
        for change in changes:
            self._end(lost_by(change))
        if isinstance(event, CheckpointSaved) and not self._steps.is_replaced(event):
            self.settled = max(self.settled, event.oldest_step)
            for step in before.keys() - self.batches.keys():
                self._forget(ref.group_id for ref in before[step].groups)
        return changes

    def _complete(self, event: GroupCompleted, seq: int) -> None:
        self.completed[seq] = event
        self._seqs_of_groups.setdefault(event.group_id, []).append(seq)
        if not self._verdicts:
            self.kept[seq] = None
        self._bound()

    def _refuse(self, event: WeightsRefused) -> None:
        self.refused = max(self.refused, event.version)
        if event.num_refusals > 1:
            self.refused_again = max(self.refused_again, event.version)
        if event.unusable:
            self.unusable = max(self.unusable, event.version)
        self.refusal = f"{event.engine}: {event.reason}"

    def settle(self, step: int) -> None:
        """Drop batches below a step. No checkpoint of this process goes back further."""
        self.settled = max(self.settled, step)
        for number in [number for number in self.batches if number < self.settled]:
            self._forget(ref.group_id for ref in self.batches.pop(number).groups)

    def _end(self, over: Ended) -> None:
        """Drop groups that no batch can take. If one was kept before this verdict, it is read again."""
        self._forget(over.group_ids)
        for seq in over.event_seqs:
            self._forget_one(seq)

    def _forget(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            for seq in self._seqs_of_groups.pop(group_id, ()):
                self.completed.pop(seq, None)
                self.kept.pop(seq, None)

    def _forget_one(self, seq: int) -> None:
        event = self.completed.pop(seq, None)
        self.kept.pop(seq, None)
        if event is not None:
            seqs = self._seqs_of_groups[event.group_id]
            seqs.remove(seq)
            if not seqs:
                del self._seqs_of_groups[event.group_id]

    def _bound(self) -> None:
        while len(self.completed) > MAX_WAITING_GROUPS:
            self._forget_one(next(iter(self.completed)))
