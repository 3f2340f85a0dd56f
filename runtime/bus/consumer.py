"""Work deliveries of a durable consumer. Each ends by exactly one of ack, redeliver and reject."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, Generic

import anyio

from messages import DecodeError, MessageT, Plane, decode
from runtime.bus.background import in_background
from runtime.bus.dead import PATIENCE_S, DeadLetters
from runtime.bus.nats.connection import Connection, Disconnected, RawMessage
from runtime.bus.nats.consumers import ACK, IN_PROGRESS, TERM, ConsumerSettings, give_back, make_durable
from runtime.bus.nats.pull import ConsumerLost, Place, Pull, place_of, time_of

BUSY_WINDOW_S: Final = 10  # seconds over which ended deliveries are counted
MAX_PREFETCH: Final = 256  # messages that are fetched ahead by that count


class Throughput:
    """Counts the deliveries that a process ends, by second."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by second of the loop's clock

    def note_end(self, now: float) -> None:
        """Count a delivery."""
        self._counts[int(now)] = self._counts.get(int(now), 0) + 1

    def in_busiest_second(self, now: float) -> int:
        """The highest number of deliveries in one of the last BUSY_WINDOW_S seconds, at most MAX_PREFETCH."""
        oldest = int(now) - BUSY_WINDOW_S
        self._counts = {second: count for second, count in self._counts.items() if second >= oldest}
        return min(MAX_PREFETCH, max(self._counts.values(), default=0))


class Delivery(Generic[MessageT]):
    """One message delivered to this process. Open until acked, redelivered or rejected."""

    __slots__ = ("_deliveries", "_ended", "_place", "_raw", "message")

    def __init__(self, message: MessageT, raw: RawMessage, place: Place, deliveries: "Deliveries[MessageT]") -> None:
        self.message = message
        self._raw = raw
        self._place = place
        self._deliveries = deliveries
        self._ended = False

    @property
    def seq(self) -> int:
        """Sequence in the stream."""
        return self._place.stream_seq

    @property
    def num_delivered(self) -> int:
        """Number of deliveries of this message, from 1."""
        return self._place.num_delivered

    @property
    def num_pending(self) -> int:
        """Messages that the consumer still had to deliver at this delivery."""
        return self._place.num_pending

    @property
    def time(self) -> datetime:
        """Time at which the server stored the message."""
        return time_of(self._place.time_ns)

    @property
    def ended(self) -> bool:
        """Whether it was acked, redelivered or rejected."""
        return self._ended

    async def ack(self) -> None:
        """Finish the delivery. Not confirmed: if the ack is lost, the message is redelivered."""
        await self._end(ACK)

    async def redeliver(self, delay_s: float = 0.0) -> None:
        """Return the message for redelivery, to this or another process, after delay_s."""
        await self._end(give_back(delay_s))

    async def reject(self, reason: str) -> None:
        """Dead-letter the message as poison. It is never delivered again."""
        await self._end(await self._deliveries.bury(self._raw, self._place, reason))

    @asynccontextmanager
    async def heartbeat(self) -> AsyncGenerator[None, None]:
        """Keep the delivery for the duration of the block by heartbeats of this process."""
        self._deliveries.held.add(self._raw.reply)
        try:
            yield
        finally:
            self._deliveries.held.discard(self._raw.reply)

    async def _end(self, how: bytes) -> None:
        if self._ended:
            raise ValueError(f"delivery of {self._raw.subject} has already ended")
        self._ended = True
        await self._deliveries.end(self._raw.reply, how)


class Deliveries(Generic[MessageT]):
    """Deliveries of one durable consumer to this process. Several tasks may wait concurrently."""

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        *,
        plane: Plane,
        stream: str,
        settings: ConsumerSettings,
        types: Sequence[type[MessageT]],
        prefetch: int,
        prefetch_by_rate: bool,
        keeps_prefetched: bool,
    ) -> None:
        self._connection = connection
        self._dead_letters = dead_letters
        self._plane = plane
        self._stream = stream
        self._settings = settings
        self._types = tuple(types)
        self._pull = Pull(connection, stream, ahead=self._num_ahead, max_batch=settings.max_batch)
        self.prefetch = prefetch  # messages to fetch ahead of demand; those that no task takes for long are returned
        self._throughput = Throughput()
        self._prefetch_by_rate = prefetch_by_rate
        self._keeps_prefetched = keeps_prefetched
        self._stale: set[str] = set()
        self.held: set[str] = set()  # reply subjects of deliveries with a heartbeat

    async def open(self) -> None:
        """Create or find the consumer, and start to pull.

        Raises:
            BusUnavailable: no such stream, or the server refuses the consumer.
        """
        made = await make_durable(self._connection, self._stream, self._settings)
        await self._pull.open(made.name, made.epoch)

    async def close(self) -> None:
        """Return received messages that no task took."""
        with anyio.move_on_after(2 * self._connection.limits.drain_timeout_s, shield=True):
            for raw in await self._pull.close():
                await self.answer(raw.reply, give_back())

    def _num_ahead(self) -> int:
        now = asyncio.get_running_loop().time()
        by_rate = self._throughput.in_busiest_second(now) if self._prefetch_by_rate else 0
        return max(self.prefetch, by_rate if by_rate > 1 else 0)  # 1 a second may be slow

    async def next(self, timeout_s: float | None = None) -> Delivery[MessageT] | None:
        """The next usable delivery, or None after timeout_s. Dead-letters unusable messages on the way."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            remaining_s = None if deadline is None else max(0.0, deadline - loop.time())
            try:
                raw = await self._pull.next(remaining_s)
            except ConsumerLost:
                await self.open()
                continue
            if raw is None:
                return None
            place = place_of(raw.reply)
            try:
                message = decode(raw.data, raw.headers)
                if not isinstance(message, self._types):
                    raise DecodeError(f"got {type(message).__name__}, expected {self._type_names()}")
            except DecodeError as error:
                await self.answer(raw.reply, await self.bury(raw, place, str(error)))
                continue
            self._connection.counters.received += 1
            return Delivery(message, raw, place, self)

    def __aiter__(self) -> "Deliveries[MessageT]":
        return self

    async def __anext__(self) -> Delivery[MessageT]:
        while True:
            delivery = await self.next()
            if delivery is not None:
                return delivery

    def _type_names(self) -> str:
        return " or ".join(message_type.__name__ for message_type in self._types)

    async def bury(self, raw: RawMessage, place: Place, reason: str) -> bytes:
        """Dead-letter a message. Returns the acknowledgement that ends its delivery."""
        is_kept = await self._dead_letters.bury(
            f"{self._plane}.{place.stream_seq}",
            subject=raw.subject,
            reason=reason,
            headers=raw.headers,
            payload=raw.data,
        )
        return TERM if is_kept else give_back(PATIENCE_S)

    async def end(self, reply: str, how: bytes) -> None:
        """Send the acknowledgement that ends a delivery."""
        self._throughput.note_end(asyncio.get_running_loop().time())
        await self.answer(reply, how)

    async def answer(self, reply: str, how: bytes) -> None:
        """Send the acknowledgement that ends or extends a delivery."""
        try:
            await self._connection.send(reply, how)
        except Disconnected:
            self._connection.counters.acks_dropped += 1

    async def keep_alive(self, every_s: float) -> None:
        """Send heartbeats for held deliveries, and keep or return messages that no task took since the last round."""
        while True:
            await asyncio.sleep(every_s)
            buffered = self._pull.buffered
            waiting = {raw.reply for raw in buffered}
            kept = waiting if self._keeps_prefetched else set[str]()
            for reply in (*self.held, *kept):
                await self.answer(reply, IN_PROGRESS)
            for raw in [raw for raw in buffered if raw.reply in self._stale]:
                buffered.remove(raw)
                await self.answer(raw.reply, give_back())
            self._stale = waiting - kept - self._stale


@asynccontextmanager
async def opened(deliveries: Deliveries[Any], ack_wait_s: float) -> AsyncGenerator[None, None]:
    """Open deliveries for the duration of a block, and keep those with a heartbeat."""
    await deliveries.open()
    try:
        async with in_background(lambda: deliveries.keep_alive(ack_wait_s / 3)):
            yield
    finally:
        await deliveries.close()
