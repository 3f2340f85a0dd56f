"""Which groups belong into the dump files of each step: what the ledger says it changed, sorted into pairs. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from messages import BatchReady, GroupAborted, GroupCompleted, Message, Outcome, SampleSummary
from runtime.ledger.changes import AttemptEnded, Batched, Change, Closed, Issued, Judged
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.state import Group
from runtime.ledger.steps import Settled, TakenBack
from runtime.samples.dumps import Fate


class GroupRecord(msgspec.Struct, kw_only=True):
    """A group that is not in a trained batch yet, or waits to be written."""

    group_id: int
    issued_seq: int  # log sequence of its first issue
    payload_seq: int  # no data message below this one is needed by it
    completed: GroupCompleted | None = None
    event_seq: int = 0  # of the completion
    fate: Fate = Fate()


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs into the files of a step."""

    step: int
    batch: tuple[GroupRecord, ...]
    given_up: tuple[GroupRecord, ...]

    @property
    def records(self) -> list[GroupRecord]:
        return sorted((*self.batch, *self.given_up), key=lambda record: record.group_id)


class Records:
    """What the log says of groups that may still have to be written. Pure; bounded by what the ledger holds open.

    The log may begin anywhere before the oldest of them.
    """

    def __init__(self) -> None:
        self.position = 0  # log sequence folded last
        self.next_step = 0  # of the batch that is not made yet
        self._ledger = LedgerState()
        self._first_step: int | None = None  # of the first batch that the log speaks of
        self._open: dict[int, GroupRecord] = {}
        self._given_up: list[GroupRecord] = []  # completed groups that were, since the newest batch
        self._untrained: dict[int, Pair] = {}  # a batch that is not trained may be taken back

    def fold(self, event: Message, seq: int) -> Pair | None:
        """Take the next event of the log; return the pair that it closes, if it does."""
        self.position, pair = seq, None
        if isinstance(event, BatchReady):
            self._first_step = event.step if self._first_step is None else self._first_step
            if event.step < self._first_step:  # made again, for a loss from before the log's beginning
                self._ledger.reopen(event.step)
        for change in fold(self._ledger, event, seq):
            pair = self._take(change, seq) or pair
        if isinstance(event, BatchReady):
            self.next_step = max(self.next_step, event.step + 1)
        return pair

    def rest(self) -> Pair:
        """What no pair holds yet: completed groups that wait, and those given up since the newest batch."""
        waiting = tuple(record for record in self._open.values() if record.completed is not None)
        return Pair(step=self.next_step, batch=waiting, given_up=tuple(self._given_up))

    def low_water(self) -> int:
        """No data message below this one will be read."""
        return min((record.payload_seq for record in self._held()), default=self._ledger.newest_payload + 1)

    def needed_seq(self) -> int:
        """Who starts again needs no event before this one."""
        return min((record.issued_seq for record in self._held()), default=self.position + 1)

    def _held(self) -> Iterable[GroupRecord]:
        yield from self._open.values()
        yield from self._given_up
        for pair in self._untrained.values():
            yield from (*pair.batch, *pair.given_up)

    def _take(self, change: Change, seq: int) -> Pair | None:
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
        if isinstance(event, GroupAborted):  # what was spilled may be cited later, and lies above the first bound
            record.payload_seq = min(record.payload_seq, change.group.payload_seq)
        elif isinstance(event, GroupCompleted):
            record.payload_seq, record.completed, record.event_seq = change.group.payload_seq, event, seq

    def _give_up(self, group: Group, reason: str | None) -> None:
        """A group that completed is written with the next batch; of the others there is nothing to write."""
        record = self._open.pop(group.group_id, None)
        if record is not None and record.completed is not None:
            if record.fate.verdict not in (Outcome.DROP, Outcome.FAILED):  # their verdict says why
                record.fate = msgspec.structs.replace(record.fate, closed=reason)
            self._given_up.append(record)

    def _batch(self, change: Batched) -> Pair | None:
        batch = tuple(self._open.pop(group.group_id) for group in change.groups)
        for group in change.passed_over:
            self._give_up(group, group.reason)
        for record in batch:
            record.fate = msgspec.structs.replace(record.fate, step=change.step)
        pair = self._untrained[change.step] = Pair(step=change.step, batch=batch, given_up=tuple(self._given_up))
        self._given_up = []
        return pair if pair.records else None

    def _take_back(self, change: TakenBack) -> None:
        """The batch is made again; the groups that were lost are generated again before that."""
        pair, lost = self._untrained.pop(change.step), {ref.group_id for ref in change.lost}
        for record in pair.batch:
            record.fate = msgspec.structs.replace(record.fate, step=None)
            if record.group_id in lost:
                record.completed, record.event_seq, record.fate = None, 0, Fate()
                record.payload_seq = self._ledger.groups[record.group_id].payload_seq
            self._open[record.group_id] = record
        self._given_up = [*pair.given_up, *self._given_up]


def payloads_of(samples: Sequence[SampleSummary]) -> list[int]:
    """The data messages that samples lie in, each once."""
    return sorted({ref.seq for sample in samples for ref in sample.segments})
