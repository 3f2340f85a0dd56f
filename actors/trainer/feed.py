"""The trainer's side of the log: follows it, and has the payloads of the next batch at hand when it is called for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.trainer.assembly import NO_MASKING, CollectedGroup, assemble, payload_seqs
from actors.trainer.batching import TrainBatch
from actors.trainer.history import HISTORY, History
from actors.trainer.staleness import Masking
from messages import BatchReady, GroupCompleted, GroupRef, SegmentsPublished, TrainerStarted
from runtime.bus import Bus, Fenced, PayloadLost

log = structlog.get_logger()

NUM_PREFETCHERS: Final = 8
MAX_PREFETCHES: Final = 1024  # groups that wait to be fetched ahead; beyond, they are fetched when called for
EVENT_TIMEOUT_S: Final = 30.0  # for an event that is known to be in the log


class Feed:
    """Batches by step. Payloads of groups are fetched as the groups complete, before a batch names them."""

    def __init__(self, bus: Bus, masking: Masking = NO_MASKING) -> None:
        self._masking = masking
        self.history = History()
        self.caught_up = anyio.Event()  # all that was in the log at the start is folded
        self._bus = bus
        self._changed = anyio.Condition()
        self._payloads: dict[int, dict[int, SegmentsPublished]] = {}  # by log sequence of the group
        self._prefetch: MemoryObjectSendStream[int] | None = None
        self._own_start_seq = 0

    async def run(self) -> None:
        """Follow the log until cancelled.

        Raises:
            Fenced: another trainer started after this one.
        """
        send, receive = anyio.create_memory_object_stream[int](MAX_PREFETCHES)
        self._prefetch = send
        async with anyio.create_task_group() as group:
            with send, receive:
                for _ in range(NUM_PREFETCHERS):
                    group.start_soon(self._prefetch_groups, receive.clone())
                await self._follow()

    async def _follow(self) -> None:
        async with self._bus.read(*HISTORY) as events:
            while True:
                if not events.pending:
                    self.caught_up.set()
                received = await events.next()  # none: unreadable, and the last one for now
                if received is not None:
                    self.history.fold(received.message, received.seq)
                    await self._react(received.message, received.seq)

    async def _react(self, event: object, seq: int) -> None:
        match event:
            case GroupCompleted() if self.caught_up.is_set() and self._prefetch is not None:
                with suppress(anyio.WouldBlock):
                    self._prefetch.send_nowait(seq)
            case BatchReady():
                async with self._changed:
                    self._changed.notify_all()
            case TrainerStarted() if self._own_start_seq and seq > self._own_start_seq:
                raise Fenced(f"trainer incarnation {event.incarnation} started")
            case _:
                pass

    def started(self, seq: int) -> None:
        """Say which event announced this trainer."""
        self._own_start_seq = seq

    async def batch(self, step: int) -> TrainBatch | None:
        """Wait for the batch of a step, however long it takes, and lay it out; None if nothing in it can be trained.

        Raises:
            PayloadLost: a payload is gone.
            ValueError: what was stored contradicts the log.
        """
        async with self._changed:
            while step not in self.history.batches:
                await self._changed.wait()
        groups = await self._collect(self.history.batches[step])
        return assemble(step, groups, self.history.steps_of_versions, self._masking)

    async def prefetch(self, step: int) -> None:
        """Fetch the payloads of a step if its batch is known already."""
        batch = self.history.batches.get(step)
        if batch is not None:
            await self._collect(batch)

    def settle(self, step: int) -> None:
        """Forget batches below a step, and what was fetched for groups that were closed."""
        self.history.settle(step)
        for seq in [seq for seq in self._payloads if seq not in self.history.completed]:
            del self._payloads[seq]

    async def _collect(self, batch: BatchReady) -> list[CollectedGroup]:
        collected: dict[int, CollectedGroup] = {}

        async def collect(ref: GroupRef) -> None:
            completed = await self._completed(ref)
            collected[ref.event_seq] = CollectedGroup(completed, await self._fetch(ref.event_seq, completed))

        async with anyio.create_task_group() as group:
            for ref in batch.groups:
                group.start_soon(collect, ref)
        return [collected[ref.event_seq] for ref in batch.groups]

    async def _completed(self, ref: GroupRef) -> GroupCompleted:
        if ref.event_seq in self.history.completed:
            return self.history.completed[ref.event_seq]
        async with self._bus.read(GroupCompleted, from_seq=ref.event_seq) as events:
            received = await events.next(EVENT_TIMEOUT_S)
        if received is None or received.seq != ref.event_seq:
            raise PayloadLost(f"the log has no completed group at {ref.event_seq}")
        self.history.completed[ref.event_seq] = received.message
        return received.message

    async def _fetch(self, seq: int, completed: GroupCompleted) -> dict[int, SegmentsPublished]:
        if seq not in self._payloads:
            payloads: dict[int, SegmentsPublished] = {}
            for payload_seq in payload_seqs(completed):
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
                except PayloadLost as error:  # matters only if a batch names the group, which then fails
                    log.warning("payload_not_prefetched", group_id=completed.group_id, error=str(error))

    @asynccontextmanager
    async def prefetching(self, step: int) -> AsyncGenerator[None, None]:
        """Fetch the payloads of a step while the block runs."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.prefetch, step)
            yield
