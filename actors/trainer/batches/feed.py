"""The trainer's side of the log: follows it, and has the payloads of the next batch at hand when it is called for."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.trainer.batches.assembly import NO_MASKING, CollectedGroup, assemble, payload_seqs, problems_of
from actors.trainer.batches.batch import TrainBatch
from actors.trainer.batches.history import HISTORY, History
from actors.trainer.batches.staleness import Masking
from actors.trainer.batches.too_long import LengthLimit
from messages import (
    BatchReady,
    CheckpointRequested,
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
from runtime.host.actor import InputError
from runtime.ledger.archive import newest_snapshot
from runtime.ledger.completions import kept_by
from runtime.ledger.fold import FOLD_VERSION

log = structlog.get_logger()

NO_LIMIT: Final = LengthLimit()
NUM_PREFETCHERS: Final = 8
MAX_PREFETCHES: Final = 1024  # groups that wait to be fetched ahead; beyond, they are fetched when called for
EVENT_TIMEOUT_S: Final = 30.0  # for an event that is known to be in the log
SNAPSHOT_TIMEOUT_S: Final = 120.0  # for the buffer to fold the archive and take one


@dataclass(frozen=True)
class FedBatch:
    """A batch with what is there of it."""

    step: int
    refs: tuple[GroupRef, ...]
    batch: TrainBatch | None  # None: nothing in it can be trained
    lost: tuple[GroupRef, ...] = ()  # groups that are not in it, since what was stored of them is gone
    reason: str = ""  # of the first of them


class Feed:
    """Batches by step. Payloads of groups are fetched as the groups complete, before a batch names them."""

    def __init__(
        self,
        bus: Bus,
        masking: Masking = NO_MASKING,
        limit: LengthLimit = NO_LIMIT,
        vocab_size: int | None = None,
    ) -> None:
        """Begin without anything.

        Args:
            bus: to read from.
            masking: which tokens do not train on account of the weights that sampled them.
            limit: how long samples may be.
            vocab_size: of the model; none: not known.
        """
        self.history = History()
        self.caught_up = anyio.Event()  # all that was in the log at the start is folded
        self._bus = bus
        self._masking = masking
        self._limit = limit
        self._vocab_size = vocab_size
        self._changed = anyio.Condition()
        self._payloads: dict[int, dict[int, SegmentsPublished]] = {}  # by log sequence of the group
        self._prefetch: MemoryObjectSendStream[int] | None = None
        self._own_start: TrainerStarted | None = None
        self._own_start_seq = 0
        self._starts: dict[tuple[int, str], int] = {}  # where each start was told first: one may be stored again later

    async def run(self) -> None:
        """Follow the log until cancelled.

        Raises:
            Fenced: another trainer started after this one.
            InputError: the log's beginning is gone, and no snapshot that can be used speaks of it.
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
        """Begin with the newest snapshot and follow what comes after it; return if the log was trimmed meanwhile."""
        self.history = History(await newest_snapshot(self._bus))
        async with self._bus.read(*HISTORY, from_seq=self.history.from_seq) as events:
            async for received in events.so_far():
                self.history.fold(received.message, received.seq)
            if await is_trimmed(self._bus, self.history.covered):
                return
            self.caught_up.set()
            await self._keep_following(events)

    async def _keep_following(self, events: Events[Message]) -> None:
        async for received in events:
            changes = self.history.fold(received.message, received.seq)
            await self._react(received.message, received.seq, changed=bool(changes))

    async def _react(self, event: Message, seq: int, *, changed: bool) -> None:
        if changed or isinstance(event, BatchReady | CheckpointRequested | WeightsRefused) or kept_by(event):
            await self.tell()
        match event:
            case GroupCompleted() if self._prefetch is not None:
                with suppress(anyio.WouldBlock):
                    self._prefetch.send_nowait(seq)
            case TrainerStarted():
                self._starts.setdefault((event.incarnation, event.start), seq)
                self._check_fence()
            case _:
                pass

    async def tell(self) -> None:
        """Let who waits in `until` look again."""
        async with self._changed:
            self._changed.notify_all()

    def started(self, event: TrainerStarted, seq: int) -> None:
        """Say which event announced this trainer.

        Raises:
            Fenced: another trainer started after this one.
        """
        self._own_start, self._own_start_seq = event, seq
        self._check_fence()

    def _check_fence(self) -> None:
        own, own_seq = self._own_start, self._own_start_seq
        if own is None:
            return
        for (incarnation, start), seq in self._starts.items():
            if seq > own_seq and incarnation >= own.incarnation and start != own.start:
                raise Fenced(f"another trainer started at {seq}, after {own_seq}")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, however long it takes, until batches, groups, losses, refusals or checkpoints asked for do."""
        async with self._changed:
            while not condition():
                await self._changed.wait()

    async def batch(self, step: int) -> FedBatch:
        """Wait for the batch of a step, however long it takes, and lay out what is there of it.

        A sample that cannot be true is left out of it.

        Raises:
            InputError: a sample is too long, which is to be an error.
        """
        await self.until(lambda: step in self.history.batches)
        refs = self.history.batches[step].groups
        groups, lost = await self._collect(refs)
        for group in groups:
            self._limit.check(group.completed)
            for (index, part), problem in group.problems.items():
                names = {"group_id": group.completed.group_id, "index": index, "part": part}
                log.warning("sample_invalid", **names, written_by=group.completed.instance, reason=problem)
        batch = assemble(step, groups, self.history.steps_of_versions, self._masking)
        missing = tuple(ref for ref in refs if ref in lost)
        return FedBatch(step, refs, batch, missing, next(iter(lost.values()), ""))

    def kept(self) -> Iterator[int]:
        """Groups that a verdict kept and whose payloads are here, by log sequence, in the order of their verdicts."""
        return (seq for seq in self.history.kept if seq in self._payloads)

    def group(self, seq: int) -> TrainBatch | None:
        """Lay one of them out as it will be in its batch, but for tokens that its step masks; None: without samples."""
        completed = self.history.completed[seq]
        collected = self._checked(completed, self._payloads[seq])
        return assemble(self.history.frontier, [collected], self.history.steps_of_versions)

    async def prefetch(self, step: int) -> None:
        """Fetch the payloads of a step if its batch is known already. What is lost is told when it is called for."""
        batch = self.history.batches.get(step)
        if batch is not None:
            await self._collect(batch.groups)

    def settle(self, step: int) -> None:
        """Forget batches below a step, and what was fetched for groups that were closed."""
        self.history.settle(step)
        for seq in [seq for seq in self._payloads if seq not in self.history.completed]:
            del self._payloads[seq]

    async def _collect(self, refs: Sequence[GroupRef]) -> tuple[list[CollectedGroup], dict[GroupRef, str]]:
        """The groups of a batch in order, and why others of it are lost."""
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

    def _checked(self, completed: GroupCompleted, payloads: dict[int, SegmentsPublished]) -> CollectedGroup:
        too_long = self._limit.too_long(completed)
        problems = problems_of(completed, payloads, self._vocab_size, too_long)
        return CollectedGroup(completed, payloads, too_long, problems)

    async def _completed(self, ref: GroupRef) -> GroupCompleted:
        if ref.event_seq in self.history.completed:
            return self.history.completed[ref.event_seq]
        async with self._bus.read(GroupCompleted, from_seq=ref.event_seq) as events:
            received = await events.next(EVENT_TIMEOUT_S)
            while received is None and (await self._bus.state(Plane.EVENT)).first_seq <= ref.event_seq:
                received = await events.next(EVENT_TIMEOUT_S)  # the bus is slow, which is no loss
        if received is None or received.seq != ref.event_seq:
            raise PayloadLost(f"the log has no completed group at {ref.event_seq}")
        self.history.completed[ref.event_seq] = received.message
        return received.message

    async def _fetch(self, seq: int, completed: GroupCompleted) -> dict[int, SegmentsPublished]:
        if seq not in self._payloads:
            payloads: dict[int, SegmentsPublished] = {}
            for payload_seq in payload_seqs(completed, self._limit.too_long(completed)):
                payloads[payload_seq] = await self._bus.fetch(SegmentsPublished, payload_seq)
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
                except PayloadLost as error:  # matters only if a batch names the group, which then is told
                    log.warning("payload_not_prefetched", group_id=completed.group_id, error=str(error))

    @asynccontextmanager
    async def prefetching(self, step: int) -> AsyncGenerator[None, None]:
        """Fetch the payloads of a step while the block runs."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.prefetch, step)
            yield


async def is_trimmed(bus: Bus, covered: int) -> bool:
    """Whether events after a snapshot went before they could be read; a later snapshot has them then.

    After a change of the fold the buffer takes one when it starts, so this waits for a while.

    Raises:
        InputError: no snapshot has them.
    """
    first_seq = (await bus.state(Plane.EVENT)).first_seq
    if first_seq <= covered + 1:
        return False
    with anyio.move_on_after(SNAPSHOT_TIMEOUT_S):
        async with bus.read(SnapshotTaken, buries=False) as snapshots:
            async for received in snapshots:
                if received.message.fold_version == FOLD_VERSION and received.message.covers > covered:
                    return True
    raise InputError(f"the log begins at event {first_seq}, and no snapshot that can be used says what was before")
