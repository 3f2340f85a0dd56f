"""Which groups belong into the dump files of each step, by the log alone. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
    RolloutRequested,
    SampleSummary,
    TrainerStarted,
    VerdictGiven,
)
from messages.subjects import key_of
from runtime.ledger.fold import OVER_SAMPLING_FILTER
from runtime.samples.dumps import Fate


class Record(msgspec.Struct, kw_only=True):
    """A group that is not in a trained batch yet, or waits to be written."""

    group_id: int
    issued_seq: int  # log sequence of its first issue
    attempt: int
    num_samples: int  # that it should have; 0: unknown
    payload_seq: int  # no data message below this one is needed by it
    ended: bool = False  # the attempt; what comes later of it is a zombie's
    completed: GroupCompleted | None = None
    event_seq: int = 0  # of the completion
    fate: Fate = Fate()
    spare: bool = False  # the next batch closes it if it is not in it


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs into the files of a step."""

    step: int
    batch: tuple[Record, ...]
    given_up: tuple[Record, ...]

    @property
    def records(self) -> list[Record]:
        return sorted((*self.batch, *self.given_up), key=lambda record: record.group_id)


class Records:
    """What the log says of groups that may still have to be written. Pure; bounded by what the ledger holds open."""

    def __init__(self) -> None:
        self.position = 0  # log sequence folded last
        self.next_step = 0  # of the batch that is not made yet
        self._open: dict[int, Record] = {}
        self._given_up: list[Record] = []  # completed groups that were, since the newest batch
        self._untrained: dict[int, Pair] = {}  # a batch that is not trained may be taken back
        self._newest_payload = 0  # highest data message cited so far

    def fold(self, event: Message, seq: int) -> Pair | None:
        """Take the next event of the log; return the pair that it closes, if it does."""
        self.position = seq
        match event:
            case GroupsIssued():
                self._issue(event, seq)
            case GroupCompleted() | GroupAborted() | GroupFailed():
                self._end(event, seq)
            case VerdictGiven():
                self._judge(event)
            case GroupsClosed():
                for group_id in event.group_ids:
                    self._close(group_id, event.reason)
            case BatchReady():
                return self._batch(event)
            case BatchTrained():
                self._untrained.pop(event.step, None)
            case TrainerStarted():
                self._settle(event.step)
            case CheckpointSaved():
                self._settle(event.oldest_step)
            case PayloadsMissing():
                self._take_back(event)
            case MessageDeadLettered():
                self._lose_task(event)
            case _:
                pass
        return None

    def rest(self) -> Pair:
        """What no pair holds yet: completed groups that wait, and those given up since the newest batch."""
        waiting = tuple(record for record in self._open.values() if record.completed is not None)
        return Pair(step=self.next_step, batch=waiting, given_up=tuple(self._given_up))

    def low_water(self) -> int:
        """No data message below this one will be read."""
        return min((record.payload_seq for record in self._held()), default=self._newest_payload + 1)

    def needed_seq(self) -> int:
        """Who starts again needs no event before this one."""
        return min((record.issued_seq for record in self._held()), default=self.position + 1)

    def _held(self) -> Iterable[Record]:
        yield from self._open.values()
        yield from self._given_up
        for pair in self._untrained.values():
            yield from (*pair.batch, *pair.given_up)

    def _issue(self, event: GroupsIssued, seq: int) -> None:
        for issued in event.groups:
            record = self._open.get(issued.group_id)
            if record is None and issued.attempt == 0:
                self._open[issued.group_id] = Record(
                    group_id=issued.group_id,
                    issued_seq=seq,
                    attempt=0,
                    num_samples=event.num_samples,
                    payload_seq=self._newest_payload + 1,
                )
            elif record is not None and issued.attempt > record.attempt:
                record.attempt, record.num_samples, record.ended = issued.attempt, event.num_samples, False

    def _end(self, event: GroupCompleted | GroupAborted | GroupFailed, seq: int) -> None:
        record = self._open.get(event.group_id)
        if record is None or record.attempt != event.attempt or record.ended:
            return
        if isinstance(event, GroupFailed):
            del self._open[event.group_id]
            return
        record.ended = True
        cited = payloads_of(event.samples)
        self._newest_payload = max([self._newest_payload, *cited])
        if isinstance(event, GroupAborted):  # what was spilled may be cited later, and lies above the first bound
            record.payload_seq = min([record.payload_seq, *cited])
            return
        record.payload_seq = min(cited, default=record.payload_seq)
        record.completed, record.event_seq = event, seq
        got = len({sample.index for sample in event.samples})
        if record.num_samples and got != record.num_samples:
            self._close(event.group_id, f"{got} samples where {record.num_samples} were asked for")

    def _lose_task(self, event: MessageDeadLettered) -> None:
        key = key_of(event.subject, RolloutRequested) or ""
        for record in self._open.values():
            if not record.ended and key == f"{record.group_id}.{record.attempt}":
                del self._open[record.group_id]
                return

    def _judge(self, event: VerdictGiven) -> None:
        record = self._open.get(event.group_id)
        if record is None or record.event_seq != event.event_seq or record.fate.verdict is not None:
            return
        record.fate = Fate(verdict=event.outcome, verdict_reason=event.reason)
        record.spare = event.outcome is Outcome.SPARE
        if event.outcome in (Outcome.DROP, Outcome.FAILED):
            self._given_up.append(self._open.pop(event.group_id))

    def _close(self, group_id: int, reason: str) -> None:
        record = self._open.pop(group_id, None)
        if record is not None and record.completed is not None:
            record.fate = msgspec.structs.replace(record.fate, closed=reason)
            self._given_up.append(record)

    def _batch(self, event: BatchReady) -> Pair | None:
        """The buffer alone makes batches, so each counts: one of a step that had one before replaces it."""
        batch = [self._open.pop(ref.group_id) for ref in event.groups if self._is_here(ref)]
        for group_id in event.passed_over:
            self._close(group_id, OVER_SAMPLING_FILTER)
        for spare in [record for record in self._open.values() if record.spare]:
            self._close(spare.group_id, spare.fate.verdict_reason or "passed_over")
        for record in batch:
            record.fate = msgspec.structs.replace(record.fate, step=event.step)
        pair = Pair(step=event.step, batch=tuple(batch), given_up=tuple(self._given_up))
        self._given_up = []
        self._untrained[event.step] = pair
        self.next_step = max(self.next_step, event.step + 1)
        return pair if pair.records else None

    def _is_here(self, ref: GroupRef) -> bool:
        record = self._open.get(ref.group_id)
        return record is not None and record.event_seq == ref.event_seq

    def _settle(self, step: int) -> None:
        self._untrained = {known: pair for known, pair in self._untrained.items() if known >= step}

    def _take_back(self, event: PayloadsMissing) -> None:
        """The batch is made again; the groups that were lost are generated again before that."""
        pair, lost = self._untrained.get(event.step), {ref.event_seq for ref in event.groups}
        if pair is None or lost.isdisjoint(record.event_seq for record in pair.batch):
            return
        del self._untrained[event.step]
        for record in pair.batch:
            record.fate, record.spare = msgspec.structs.replace(record.fate, step=None), False
            if record.event_seq in lost:
                record.completed, record.event_seq, record.fate = None, 0, Fate()
                record.payload_seq = self._newest_payload + 1
            self._open[record.group_id] = record
        self._given_up = [*pair.given_up, *self._given_up]


def payloads_of(samples: Sequence[SampleSummary]) -> list[int]:
    """The data messages that samples lie in, each once."""
    return sorted({ref.seq for sample in samples for ref in sample.segments})
