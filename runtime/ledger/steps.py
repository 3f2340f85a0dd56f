"""State changes of batches: made, trained, taken back, forgotten. Used by the ledger and by the trainer. Pure.

The log may hold facts of a trainer that froze and was replaced. They count for nothing after its successor's start.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupRef,
    PayloadsMissing,
    PhaseChanged,
    TrainerStarted,
    UntrainedSamples,
    WeightsAnnounced,
)

StepEvent = BatchTrained | TrainerStarted | CheckpointSaved | PayloadsMissing
STEP_EVENTS: Final = (BatchTrained, TrainerStarted, CheckpointSaved, PayloadsMissing)
TrainerFact = StepEvent | WeightsAnnounced | PhaseChanged


class Batch(msgspec.Struct, kw_only=True):
    """A batch that the oldest loadable checkpoint does not contain."""

    groups: tuple[GroupRef, ...]
    payload_seq: int = 0  # lowest data sequence that it needs
    oldest_version: int = 0  # among the tokens of its groups
    trained: bool = False


class Settled(msgspec.Struct, frozen=True):
    """A batch was trained for the first time."""

    step: int
    groups: tuple[GroupRef, ...]
    skipped: frozenset[int] = frozenset()  # ids of groups that contributed no gradient
    untrained: tuple[UntrainedSamples, ...] = ()  # samples that contributed no gradient


class TakenBack(msgspec.Struct, frozen=True):
    """A batch was dissolved before training, because payloads of some of its groups are lost."""

    step: int
    groups: tuple[GroupRef, ...]
    lost: frozenset[GroupRef]  # groups of the batch with lost payloads


StepChange = Settled | TakenBack


class Trainers(msgspec.Struct, kw_only=True, dict=True):
    """Which trainer counts: the one with the highest incarnation; of one incarnation, the last that started."""

    trainer_incarnation: int = 0
    trainer_starts: tuple[str, ...] = ()  # ids of the starts with this incarnation, in log order

    def begin(self, event: TrainerStarted) -> bool:
        """Take up a trainer's start. Returns False for a start that is known or replaced."""
        if event.incarnation < self.trainer_incarnation:
            return False
        known = self.trainer_starts if event.incarnation == self.trainer_incarnation else ()
        if event.start and event.start in known:
            return False
        self.trainer_incarnation = event.incarnation
        self.trainer_starts = (*known, event.start) if event.start else known
        return True

    def is_replaced(self, event: TrainerFact) -> bool:
        """Whether the trainer that wrote an event has a successor, which may have lost its steps."""
        if event.incarnation != self.trainer_incarnation:
            return event.incarnation < self.trainer_incarnation
        return event.start in self.trainer_starts[:-1]


class Steps(Trainers, kw_only=True, dict=True):
    """The state of train steps and their batches."""

    incarnation: int = 0  # of the buffer that owns the ledger
    round: int = 0  # the open round: number of the next batch
    taken_back: tuple[int, ...] = ()  # earlier steps that need a new batch, because payloads were lost
    batches: dict[int, Batch] = {}  # by step
    lost: dict[int, tuple[int, ...]] = {}  # by step: completions with lost payloads, which no batch takes again
    trained_steps: int = 0  # number of trained steps in the log
    checkpoint_step: int = 0  # train steps in the newest checkpoint that was not found damaged
    gathered: BatchReady | None = None  # the events of a batch so far, of which more follow

    def takes_batch(self, event: BatchReady) -> bool:
        """Whether a batch is accepted now. One that was taken back is not accepted again."""
        lost = self.lost.get(event.step, ())
        is_open = event.step >= self.round or event.step in self.taken_back
        return is_open and not any(ref.event_seq in lost for ref in event.groups)

    def reopen(self, step: int) -> None:
        """Accept another batch of a step, for readers of a log that lacks its PayloadsMissing event."""
        self.taken_back = tuple(sorted({*self.taken_back, step}))

    def gather(self, event: BatchReady) -> BatchReady | None:
        """Join the events of a batch: return the whole batch with its last event, None before.

        An event without the ones before it is ignored: a buffer that ended between them decides anew. So is one of
        a replaced buffer.
        """
        if event.incarnation < self.incarnation:
            return None
        before, self.gathered = self.gathered, None
        if event.index:
            due = before and (before.incarnation, before.step, before.index + 1)
            if before is None or due != (event.incarnation, event.step, event.index):
                return None
            groups, passed_over = before.groups + event.groups, before.passed_over + event.passed_over
            event = msgspec.structs.replace(event, groups=groups, passed_over=passed_over)
        if event.index + 1 < event.num_events:
            self.gathered = event
            return None
        return event

    def make(self, step: int, batch: Batch) -> None:
        """Record a new batch."""
        self.batches[step] = batch
        self.taken_back = tuple(other for other in self.taken_back if other != step)
        self.round = max(self.round, step + 1)


def advance(steps: Steps, event: StepEvent) -> tuple[StepChange, ...]:
    """Apply an event of the trainer. Returns the changes of batches.

    A duplicate event, or one of a replaced trainer, changes none. Versions before the start id counted steps and lost
    payloads of any trainer. Their logs fold as they did, because their decisions followed from that.
    """
    match event:
        case TrainerStarted():
            if not steps.begin(event):
                return ()
            steps.checkpoint_step = min(steps.checkpoint_step, event.step)  # a newer one that it passed over is damaged
            return _settle(steps, [step for step in steps.batches if step < event.step])
        case CheckpointSaved() if steps.is_replaced(event):
            return ()
        case BatchTrained() | PayloadsMissing() if event.start and steps.is_replaced(event):
            return ()
        case BatchTrained():
            return () if event.step in steps.taken_back else _settle(steps, (event.step,), event)
        case CheckpointSaved():
            steps.checkpoint_step = max(steps.checkpoint_step, event.step)
            contained = [step for step in steps.batches if step < event.oldest_step]
            changes = _settle(steps, contained)
            for step in contained:
                del steps.batches[step]
            steps.taken_back = tuple(step for step in steps.taken_back if step >= event.oldest_step)
            steps.lost = {step: seqs for step, seqs in steps.lost.items() if step >= event.oldest_step}
            return changes
        case PayloadsMissing():
            return _take_back(steps, event)


def _settle(steps: Steps, numbers: Iterable[int], trained: BatchTrained | None = None) -> tuple[StepChange, ...]:
    """Settle batches. Without a BatchTrained event, all their samples count as trained."""
    skipped, untrained = (frozenset(trained.skipped_groups), trained.untrained) if trained else (frozenset[int](), ())
    settled: list[Settled] = []
    for step in numbers:
        batch = steps.batches.get(step)
        steps.trained_steps = max(steps.trained_steps, step + 1)
        if batch is not None and not batch.trained:  # else trained again after a crash, or from an old checkpoint
            batch.trained = True
            settled.append(Settled(step, batch.groups, skipped, untrained))
    return tuple(settled)


def _take_back(steps: Steps, event: PayloadsMissing) -> tuple[StepChange, ...]:
    batch = steps.batches.get(event.step)
    if batch is None or batch.trained:
        return ()
    lost = frozenset(event.groups).intersection(batch.groups)
    if not lost:
        return ()
    del steps.batches[event.step]
    known = steps.lost.get(event.step, ())
    steps.lost[event.step] = tuple(sorted({*known, *(ref.event_seq for ref in lost)}))
    steps.taken_back = tuple(sorted({*steps.taken_back, event.step}))
    return (TakenBack(event.step, batch.groups, lost),)
