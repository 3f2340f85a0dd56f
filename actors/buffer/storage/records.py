"""Assigns groups to the dump files of each step, from the ledger's changes. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from messages import BatchReady, GroupAborted, GroupCompleted, Message, Outcome, SampleSummary
from runtime.data.dumps import Fate
from runtime.ledger.changes import AttemptEnded, Batched, Change, Closed, Issued, Judged
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.state import Group
from runtime.ledger.steps import Settled, TakenBack


class GroupRecord(msgspec.Struct, kw_only=True):
    """A group whose dump is not final yet: its batch is not trained, or the group is not written."""

    group_id: int
    issued_seq: int  # log sequence of its first issue
    payload_seq: int  # oldest data message that it needs
    completed: GroupCompleted | None = None
    event_seq: int = 0  # log sequence of the completion
    fate: Fate = Fate()


class StepDump(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the two dump files of a step."""

    step: int
    batch: tuple[GroupRecord, ...]
    given_up: tuple[GroupRecord, ...]

    @property
    def records(self) -> list[GroupRecord]:
        return sorted((*self.batch, *self.given_up), key=lambda record: record.group_id)


class Records:
    """Tracks groups that may still have to be written. Pure; bounded by the ledger's open groups.

    The log may start anywhere before the oldest of these groups.
    """

    def __init__(self) -> None:
        self.position = 0  # log sequence of the last folded event
        self.next_step = 0  # step of the next batch
        self._ledger = LedgerState()
        self._first_step: int | None = None  # of the first batch in the log
        self._open: dict[int, GroupRecord] = {}
        self._given_up: list[GroupRecord] = []  # completed groups closed since the newest batch
        self._untrained: dict[int, StepDump] = {}  # an untrained batch may be taken back

    def fold(self, event: Message, seq: int) -> StepDump | None:
        """Fold the next event of the log; return the contents of the files that it completes, or None."""
        self.position, pair = seq, None
        if isinstance(event, BatchReady):
            self._first_step = event.step if self._first_step is None else self._first_step
            if event.step < self._first_step:  # rebuilt, because of a loss before the start of the log
                self._ledger.reopen(event.step)
        for change in fold(self._ledger, event, seq):
            pair = self._take(change, seq) or pair
        if isinstance(event, BatchReady) and self._ledger.gathered is None:
            self.next_step = max(self.next_step, event.step + 1)
        return pair

    def rest(self) -> StepDump:
        """The groups in no step's files yet: completed open groups, and groups closed since the newest batch."""
        waiting = tuple(record for record in self._open.values() if record.completed is not None)
        return StepDump(step=self.next_step, batch=waiting, given_up=tuple(self._given_up))

    def low_water(self) -> int:
        """The oldest data message that may still be read."""
        return min((record.payload_seq for record in self._held()), default=self._ledger.newest_payload + 1)

    def needed_seq(self) -> int:
        """The oldest event that a restart needs."""
        return min((record.issued_seq for record in self._held()), default=self.position + 1)

    def _held(self) -> Iterable[GroupRecord]:
        yield from self._open.values()
        yield from self._given_up
        for pair in self._untrained.values():
            yield from (*pair.batch, *pair.given_up)

    def _take(self, change: Change, seq: int) -> StepDump | None:
        match change:
            case Issued():
                for group in change.groups:
                    payload_seq = group.payload_seq
                    record = GroupRecord(group_id=group.group_id, issued_seq=seq, payload_seq=payload_seq)
                    self._open.setdefault(group.group_id, record)
            case AttemptEnded():
                self._end(change, seq)
            case Judged():
                record = self._open[change.group.group_id]
                record.fate = Fate(verdict=change.outcome, verdict_reason=change.reason)
            case Closed():
                self._give_up(change.group, change.reason)
            case Batched():
                return self._batch(change)
            case Settled():
                self._untrained.pop(change.step, None)
            case TakenBack():
                self._take_back(change)
        return None

    def _end(self, change: AttemptEnded, seq: int) -> None:
        record, event = self._open[change.group.group_id], change.event
        if isinstance(event, GroupAborted):  # its spills may be cited later
            record.payload_seq = min(record.payload_seq, change.group.payload_seq)
        elif isinstance(event, GroupCompleted):
            record.payload_seq, record.completed, record.event_seq = change.group.payload_seq, event, seq

    def _give_up(self, group: Group, reason: str | None) -> None:
        """Close a group. A completed group is written with the next batch; others have nothing to write."""
        record = self._open.pop(group.group_id, None)
        if record is not None and record.completed is not None:
            if record.fate.verdict not in (Outcome.DROP, Outcome.FAILED):  # the verdict has the reason
                record.fate = msgspec.structs.replace(record.fate, closed=reason)
            self._given_up.append(record)

    def _batch(self, change: Batched) -> StepDump | None:
        batch = tuple(self._open.pop(group.group_id) for group in change.groups)
        for group in change.passed_over:
            self._give_up(group, group.reason)
        for record in batch:
            record.fate = msgspec.structs.replace(record.fate, step=change.step)
        pair = self._untrained[change.step] = StepDump(step=change.step, batch=batch, given_up=tuple(self._given_up))
        self._given_up = []
        return pair if pair.records else None

    def _take_back(self, change: TakenBack) -> None:
        """Reopen a batch that will be rebuilt; its lost groups are generated again first."""
        pair, lost = self._untrained.pop(change.step), {ref.group_id for ref in change.lost}
        for record in pair.batch:
            record.fate = msgspec.structs.replace(record.fate, step=None)
            if record.group_id in lost:
                record.completed, record.event_seq, record.fate = None, 0, Fate()
                record.payload_seq = self._ledger.groups[record.group_id].payload_seq
            self._open[record.group_id] = record
        self._given_up = [*pair.given_up, *self._given_up]


def payloads_of(samples: Sequence[SampleSummary]) -> list[int]:
    """Sequences of the data messages that hold these samples, each once."""
    return sorted({ref.seq for sample in samples for ref in sample.segments})
