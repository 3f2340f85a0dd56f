"""Trainer's log reader: follows the log and prefetches the payloads of the next batch."""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.trainer.data.assembly import (
    NO_MASKING,
    CollectedGroup,
    assemble,
    payload_seqs,
    problems_of,
)
from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.columns import column_seqs
from actors.trainer.data.history import HISTORY, History
from actors.trainer.data.skipped import LengthLimit
from actors.trainer.data.staleness import Masking
from messages import (
    BatchReady,
    BufferStarted,
    CheckpointRequested,
    ColumnPublished,
    GroupCompleted,
    GroupRef,
    Message,
    Plane,
    SegmentsPublished,
    SnapshotTaken,
    TrainerStarted,
    WeightsRefused,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced, PayloadLost
from runtime.bus.events import Events
from runtime.ledger.completions import kept_by
from runtime.ledger.fold import FOLD_VERSION
from runtime.ledger.snapshots import newest_readable, newest_snapshot
from runtime.process.actor import InputError

log = structlog.get_logger()

NO_LIMIT: Final = LengthLimit()
NUM_PREFETCHERS: Final = 64  # as many as the bus fetches concurrently
MAX_PREFETCHES: Final = 1024  # groups queued for prefetching; further groups are fetched with their batch
EVENT_TIMEOUT_S: Final = 30.0
SNAPSHOT_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class FedBatch:
    """A batch, and the groups of it whose payloads are lost."""

    step: int
    refs: tuple[GroupRef, ...]
    batch: TrainBatch | None  # None: nothing in it can be trained
    lost: tuple[GroupRef, ...] = ()  # groups that are not in it, since their payloads are lost
    reason: str = ""  # of the first lost group


class Payloads(NamedTuple):
    """Fetched data messages of a group, by sequence in the data stream."""

    segments: dict[int, SegmentsPublished]
    columns: dict[int, ColumnPublished]


class Feed:
    """Batches by step. Fetches the payloads of groups as the groups complete, before a batch names them."""

    def __init__(
        self,
        bus: Bus,
        masking: Masking = NO_MASKING,
        limit: LengthLimit = NO_LIMIT,
        vocab_size: int | None = None,
        *,
        reward_keys: Sequence[str] = (),
        needs_kept: bool = False,
        column_names: Sequence[str] = (),
        topk: int = 0,
        event_timeout_s: float = EVENT_TIMEOUT_S,
        snapshot_timeout_s: float = SNAPSHOT_TIMEOUT_S,
    ) -> None:
        """Start empty.

        Args:
            bus: Bus to read from.
            masking: Masks tokens by the weights that sampled them.
            limit: Length limit of samples.
            vocab_size: Vocabulary size of the model. None: unknown.
            reward_keys: Names of the rewards that the recipe trains, if there are several.
            needs_kept: Whether trained tokens need the tokens that top-p and top-k kept.
            column_names: Names of the columns that engine pools compute of each sample.
            topk: Number of likeliest tokens at each place of a teacher's column. 0: none are trained.
            event_timeout_s: Seconds for one read of an event that is known to be in the log.
            snapshot_timeout_s: Seconds for the buffer to fold the archive and take a snapshot.
        """
        self.history = History()
        self.caught_up = anyio.Event()  # set once everything in the log at the start is folded
        self.start = uuid.uuid4().hex  # id of this trainer's start
        self._bus = bus
        self._masking = masking
        self._limit = limit
        self._vocab_size = vocab_size
        self._reward_keys = reward_keys
        self._needs_kept = needs_kept
        self._column_names = column_names
        self._topk = topk
        self._event_timeout_s = event_timeout_s
        self._snapshot_timeout_s = snapshot_timeout_s
        self._changed = anyio.Condition()
        self._payloads: dict[int, Payloads] = {}  # by log sequence of the group
        self._prefetch: MemoryObjectSendStream[int] | None = None
        self._own_start: TrainerStarted | None = None
        self._own_start_seq = 0

    async def run(self) -> None:
        """Follow the log until cancelled.

        Raises:
            Fenced: Another trainer started after this one.
            InputError: The beginning of the log is trimmed, and no usable snapshot covers it.
        """
        send, receive = anyio.create_memory_object_stream[int](MAX_PREFETCHES)
        self._prefetch = send
        async with anyio.create_task_group() as group:
            with send, receive:
                for _ in range(NUM_PREFETCHERS):
                    group.start_soon(self._prefetch_groups, receive.clone())
                while not self.caught_up.is_set():
                    await self._follow()

    async def _follow(self) -> None:
        """Start with the newest snapshot and follow later events. Return if the log was trimmed meanwhile."""
        self.history = History(await newest_snapshot(self._bus))
        async with self._bus.read(*HISTORY, from_seq=self.history.from_seq) as events:
            async for received in events.so_far():
                self.history.fold(received.message, received.seq)
            if await is_trimmed(self._bus, self.history.covered, timeout_s=self._snapshot_timeout_s):
                return
            self.caught_up.set()
            await self._keep_following(events)

    async def _keep_following(self, events: Events[Message]) -> None:
        async for received in events:
            changes = self.history.fold(received.message, received.seq)
            await self._react(received.message, received.seq, changed=bool(changes))

    async def _react(self, event: Message, seq: int, *, changed: bool) -> None:
        wakes = BatchReady | BufferStarted | CheckpointRequested | WeightsRefused
        if changed or isinstance(event, wakes) or kept_by(event):
            await self.tell()
        match event:
            case GroupCompleted() if self._prefetch is not None:
                with suppress(anyio.WouldBlock):
                    self._prefetch.send_nowait(seq)
            case TrainerStarted():
                self._check_fence()
                await self.tell()
            case _:
                pass

    async def tell(self) -> None:
        """Wake the waiters in `until`."""
        async with self._changed:
            self._changed.notify_all()

    async def started(self, event: TrainerStarted, seq: int) -> None:
        """Record which event announced this trainer, and wait until the log is folded up to it.

        Before this event a replaced trainer may have written facts that count; after it, none of them does.

        Raises:
            Fenced: Another trainer replaced this one.
        """
        self._own_start, self._own_start_seq = event, seq
        self._check_fence()
        await self.until(lambda: self.history.last_seq >= seq)

    def _check_fence(self) -> None:
        own, seq = self._own_start, self._own_start_seq
        if own is not None and self.history.last_seq >= seq and self.history.is_replaced(own):
            newest = self.history.incarnation
            raise Fenced(
                f"trainer incarnation {newest} replaced this one, incarnation {own.incarnation} at event {seq}"
            )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait without a timeout for a condition on batches, groups, losses, refusals or checkpoint requests."""
        async with self._changed:
            while not condition():
                await self._changed.wait()

    async def batch(self, step: int) -> FedBatch:
        """Wait without a timeout for the batch of a step, and assemble it from the available payloads.

        Invalid samples are left out of it.

        Raises:
            InputError: A sample is too long, and the setting ends the run.
        """
        await self.until(lambda: step in self.history.batches)
        refs = self.history.batches[step].groups
        groups, lost = await self._collect(refs)
        for group in groups:
            self._limit.check(group.completed)
            for (index, part), problem in group.problems.items():
                names = {"group_id": group.completed.group_id, "index": index, "part": part}
                log.warning("sample_invalid", **names, written_by=group.completed.instance, reason=problem)
        versions = self.history.steps_of_versions
        batch = assemble(step, groups, versions, self._masking, self._reward_keys, self._column_names, self._topk)
        missing = tuple(ref for ref in refs if ref in lost)
        return FedBatch(step, refs, batch, missing, next(iter(lost.values()), ""))

    def kept(self) -> Iterator[int]:
        """Log sequences of kept groups whose payloads are here, in order of their verdicts."""
        return (seq for seq in self.history.kept if seq in self._payloads)

    def group(self, seq: int) -> TrainBatch | None:
        """Lay a group out as in its batch, except for tokens that its step masks. None: it has no samples."""
        completed = self.history.completed[seq]
        collected = self._checked(completed, self._payloads[seq])
        return assemble(
            self.history.frontier,
            [collected],
            self.history.steps_of_versions,
            reward_keys=self._reward_keys,
            column_names=self._column_names,
            topk=self._topk,
        )

    async def prefetch(self, step: int) -> None:
        """Fetch the payloads of a step if its batch exists. `batch` reports lost payloads later."""
        batch = self.history.batches.get(step)
        if batch is not None:
            await self._collect(batch.groups)

    def release(self, refs: Iterable[GroupRef]) -> None:
        """Drop the payloads of groups whose batch is laid out: it has a copy of what it needs."""
        for ref in refs:
            self._payloads.pop(ref.event_seq, None)

    def settle(self, step: int) -> None:
        """Drop batches below a step, and fetched payloads of closed groups."""
        self.history.settle(step)
        for seq in [seq for seq in self._payloads if seq not in self.history.completed]:
            del self._payloads[seq]

    async def _collect(self, refs: Sequence[GroupRef]) -> tuple[list[CollectedGroup], dict[GroupRef, str]]:
        """Collect the groups of a batch in order, and the reasons why others are lost."""
        collected: dict[int, CollectedGroup] = {}
        lost: dict[GroupRef, str] = {}

        async def collect(ref: GroupRef) -> None:
            try:
                completed = await self._completed(ref)
                payloads = await self._fetch(ref.event_seq, completed)
                collected[ref.event_seq] = self._checked(completed, payloads)
            except PayloadLost as error:
                lost[ref] = str(error)

        async with anyio.create_task_group() as group:
            for ref in refs:
                group.start_soon(collect, ref)
        return [collected[ref.event_seq] for ref in refs if ref not in lost], lost

    def _checked(self, completed: GroupCompleted, payloads: Payloads) -> CollectedGroup:
        too_long = self._limit.too_long(completed)
        problems = problems_of(
            completed,
            payloads.segments,
            self._vocab_size,
            too_long,
            self._reward_keys,
            needs_kept=self._needs_kept,
            columns=payloads.columns,
            column_names=self._column_names,
            topk=self._topk,
        )
        return CollectedGroup(completed, payloads.segments, too_long, problems, payloads.columns)

    async def _completed(self, ref: GroupRef) -> GroupCompleted:
        if ref.event_seq in self.history.completed:
            return self.history.completed[ref.event_seq]
        async with self._bus.read(GroupCompleted, from_seq=ref.event_seq) as events:
            received = await events.next(self._event_timeout_s)
            while received is None and (await self._bus.state(Plane.EVENT)).first_seq <= ref.event_seq:
                received = await events.next(self._event_timeout_s)  # a slow bus loses nothing
        if received is None or received.seq != ref.event_seq:
            raise PayloadLost(f"the log has no completed group at {ref.event_seq}")
        self.history.completed[ref.event_seq] = received.message
        return received.message

    async def _fetch(self, seq: int, completed: GroupCompleted) -> Payloads:
        if seq not in self._payloads:
            payloads, too_long = Payloads({}, {}), self._limit.too_long(completed)
            for payload_seq in payload_seqs(completed, too_long):
                payloads.segments[payload_seq] = await self._bus.fetch(SegmentsPublished, payload_seq)
            for column_seq in column_seqs(completed, self._column_names, too_long):
                payloads.columns[column_seq] = await self._bus.fetch(ColumnPublished, column_seq)
            self._payloads[seq] = payloads
        return self._payloads[seq]

    async def _prefetch_groups(self, seqs: MemoryObjectReceiveStream[int]) -> None:
        async with seqs:
            async for seq in seqs:
                completed = self.history.completed.get(seq)
                if completed is None:
                    continue
                try:
                    await self._fetch(seq, completed)
                    await self.tell()
                except PayloadLost as error:  # matters only if a batch names the group; `batch` then reports it
                    log.warning("payload_not_prefetched", group_id=completed.group_id, error=str(error))

    @asynccontextmanager
    async def prefetching(self, step: int) -> AsyncGenerator[None, None]:
        """Fetch the payloads of a step in the background while the block runs."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.prefetch, step)
            yield


async def is_trimmed(bus: Bus, covered: int, *, timeout_s: float = SNAPSHOT_TIMEOUT_S) -> bool:
    """Whether the log was trimmed past a snapshot before it could be read. A later snapshot then covers the events.

    Waits up to `timeout_s` seconds for such a snapshot: after a change of the fold, the buffer takes one when it
    starts.

    Raises:
        InputError: No snapshot covers the events.
    """
    first_seq = (await bus.state(Plane.EVENT)).first_seq
    if first_seq <= covered + 1:
        return False
    with anyio.move_on_after(timeout_s):
        async with bus.read(SnapshotTaken, buries=False) as snapshots:
            async for received in snapshots:
                event = received.message
                is_newer = event.fold_version == FOLD_VERSION and event.covers > covered
                if is_newer and await newest_readable(bus, [event]) is not None:
                    return True
    raise InputError(f"the event log begins at event {first_seq}, and no usable snapshot covers the events before it")
