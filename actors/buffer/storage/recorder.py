"""Follows the log and dumps the samples of every train step to files (run.dump_details).

The pair of a step is written when its batch is made: the batch's groups, and those given up since the batch before.
What is in it follows from the log alone, so that a restart writes again exactly what is missing.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread

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
    Plane,
    RolloutRequested,
    SampleSummary,
    SegmentsPublished,
    TrainerStarted,
    VerdictGiven,
)
from messages.subjects import key_of
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost, PayloadUnreadable
from runtime.files import whole, write_atomically
from runtime.host.actor import InputError
from runtime.ledger.fold import LEDGER_EVENTS, OVER_SAMPLING_FILTER
from runtime.samples.dumps import (
    RUN_FILE,
    TOKENIZER,
    TOPOLOGY_FILE,
    DumpedGroup,
    DumpedRun,
    Fate,
    group_of,
    told_by_of,
    write_pair,
)
from runtime.settings.topology import Topology, encode_topology

log = structlog.get_logger()

NOWHERE: Final = 2**63  # a sequence that no stream reaches
FETCHED_AT_ONCE: Final = 8  # groups
TOKENIZER_FILES: Final = ("config.json", "vocab.*", "merges.txt", "*token*.json", "tokenizer.*", "chat_template*")


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
        cited = _cited(event.samples)
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


def _cited(samples: Sequence[SampleSummary]) -> list[int]:
    return sorted({ref.seq for sample in samples for ref in sample.segments})


class Recorder:
    """Writes the dumps of a run, if it has any. A crash loses nothing: what is missing is written after the restart."""

    def __init__(self, topology: Topology, bus: Bus) -> None:
        details = topology.run.dump_details
        self._topology = topology
        self._bus = bus
        self._directory = None if details is None else Path(details)
        self._records = Records()
        self._done = 0  # log sequence up to which everything is written
        self._advanced = anyio.Condition()

    async def prepare(self) -> None:
        """Claim the directory for this run.

        Raises:
            InputError: it cannot be written, or holds the dumps of another run.
        """
        if self._directory is None:
            return
        run = DumpedRun(run=self._bus.run, began=(await self._bus.state(Plane.EVENT)).created)
        try:
            await to_thread.run_sync(_prepare, self._directory, run, self._topology)
        except OSError as error:
            raise InputError(f"run.dump_details: {self._directory} cannot be written: {error}") from error

    async def run(self) -> None:
        """Write pairs until cancelled.

        Raises:
            OSError: the disk.
        """
        if self._directory is None:
            return
        async with self._bus.read(*LEDGER_EVENTS, buries=False) as events:
            async for received in events:
                pair = self._records.fold(received.message, received.seq)
                if pair is not None:
                    told_by = (received.seq, round(received.time.timestamp() * 1e6))
                    await self._write(self._directory, pair, told_by)
                async with self._advanced:
                    self._done = received.seq
                    self._advanced.notify_all()

    async def write_rest(self, seq: int) -> None:
        """Wait until everything up to a log sequence is written, then write what has not come into a batch."""
        if self._directory is None:
            return
        async with self._advanced:
            while self._done < seq:
                await self._advanced.wait()
        rest = self._records.rest()
        if rest.records:
            await self._write(self._directory, rest, (self._records.position, 0))

    def low_water(self) -> int:
        """No data message below this one is needed."""
        return NOWHERE if self._directory is None else self._records.low_water()

    def needed_seq(self) -> int:
        """No event before this one is needed after a restart."""
        return NOWHERE if self._directory is None else self._records.needed_seq()

    async def _write(self, directory: Path, pair: Pair, told_by: tuple[int, int]) -> None:
        if await to_thread.run_sync(told_by_of, directory, pair.step) == told_by:
            return  # by an earlier start
        groups = await self._fetch(pair.records)
        if groups:
            await to_thread.run_sync(write_pair, directory, pair.step, groups, told_by)
            log.debug("samples_dumped", step=pair.step, num_groups=len(groups))

    async def _fetch(self, records: Sequence[Record]) -> list[DumpedGroup]:
        found: dict[int, DumpedGroup] = {}
        limiter = anyio.Semaphore(FETCHED_AT_ONCE)

        async def fetch(place: int, record: Record) -> None:
            async with limiter:
                group = await self._group(record)
            if group is not None:
                found[place] = group

        async with anyio.create_task_group() as tasks:
            for place, record in enumerate(records):
                tasks.start_soon(fetch, place, record)
        return [found[place] for place in sorted(found)]

    async def _group(self, record: Record) -> DumpedGroup | None:
        completed, fate = record.completed, record.fate
        if completed is None or not completed.samples:
            return None
        try:
            payloads = {seq: await self._bus.fetch(SegmentsPublished, seq) for seq in _cited(completed.samples)}
            return group_of(completed, payloads, fate)
        except (PayloadLost, PayloadUnreadable, ValueError) as error:
            log.warning("group_not_dumped", group_id=completed.group_id, reason=str(error))
            return None


def _prepare(directory: Path, run: DumpedRun, topology: Topology) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    before = _owner(directory)
    if before is not None and before != run:
        told = f"{before.run}{' before it was started over' if before.run == run.run else ''}"
        raise InputError(
            f"run.dump_details: {directory} holds the dumps of another run, {told}: "
            "move them away, or name another directory"
        )
    for leftover in directory.glob(".rollout_*.*.*"):  # of writers that were killed
        leftover.unlink()
    write_atomically(directory / TOPOLOGY_FILE, encode_topology(topology))
    _copy_tokenizer(Path(topology.model.hf_checkpoint), directory / TOKENIZER)
    write_atomically(directory / RUN_FILE, msgspec.json.encode(run) + b"\n")


def _owner(directory: Path) -> DumpedRun | None:
    path = directory / RUN_FILE
    if not path.exists():
        if any(directory.glob("rollout_*.jsonl")):
            raise InputError(f"run.dump_details: {directory} holds dumps and no {RUN_FILE}: name another directory")
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=DumpedRun)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _copy_tokenizer(model: Path, directory: Path) -> None:
    if not model.is_dir():
        log.warning("tokenizer_not_dumped", reason=f"{model} is no directory")
        return
    directory.mkdir(exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for path in model.glob(pattern):
            if path.is_file():
                _copy(path, directory / path.name)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as content, whole(target) as file:
        shutil.copyfileobj(content, file)
