"""The typed bus of one run: publish, append, read, consume, fetch, call. Subjects and bytes stay below this."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, Final, Generic, Self, overload

import msgspec

from messages import DecodeError, Message, MessageT, Plane, decode, encode, tag_of
from messages.subjects import check_run_name, filter_of, ledger_filter, plane_filter, stream_of, subject_of
from runtime.bus.background import beside
from runtime.bus.calls import Handler, Inbox, ask, serve
from runtime.bus.consumer import ConsumerSettings, Deliveries
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import BusUnavailable, CallRefused, PayloadLost, PayloadUnreadable
from runtime.bus.kv import KeyValues
from runtime.bus.limits import BusLimits, StreamLimits
from runtime.bus.nats.connection import STATUS, Connection, open_connection
from runtime.bus.nats.pull import time_of
from runtime.bus.nats.store import API, EXPECTED_LAST, EXPECTED_LAST_FILTER, Store, api_call
from runtime.bus.nats.streams import ensure_streams
from runtime.bus.reader import LogReader

DEFAULT_LIMITS: Final = BusLimits()


class Received(Generic[MessageT]):
    """A message read from a log."""

    __slots__ = ("_time_ns", "message", "pending", "seq")

    def __init__(self, message: MessageT, seq: int, time_ns: int, pending: int) -> None:
        self.message = message
        self.seq = seq  # in the stream
        self.pending = pending  # how many more there were when it was sent; 0: the reader has caught up
        self._time_ns = time_ns

    @property
    def time(self) -> datetime:
        """When it was stored."""
        return time_of(self._time_ns)

    def __repr__(self) -> str:
        return f"Received(seq={self.seq}, pending={self.pending}, message={self.message!r})"


class StreamState(msgspec.Struct, frozen=True):
    """What a stream holds."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    created: str = ""  # when, to the nanosecond: a stream that was made again is another one
    max_bytes: int = -1  # its limit; -1: none

    @property
    def used(self) -> float:
        """The share of its bytes that is taken."""
        return self.bytes / self.max_bytes if self.max_bytes > 0 else 0.0


class StoredMessage(msgspec.Struct, frozen=True):
    """A message of a stream as it lies there."""

    seq: int
    time: datetime
    headers: dict[str, str]
    payload: bytes


class Events(Generic[MessageT]):
    """Events in the order of the log."""

    def __init__(self, reader: LogReader, dead_letters: DeadLetters | None, types: tuple[type[MessageT], ...]) -> None:
        self._reader = reader
        self._dead_letters = dead_letters  # None: what cannot be used is only passed over
        self._types = types

    @property
    def pending(self) -> int:
        """How many were still to be read when this was last known: at the start, then with each event."""
        return self._reader.num_pending

    async def next(self, timeout_s: float | None = None) -> Received[MessageT] | None:
        """The next event, or None after timeout_s.

        What cannot be used becomes a dead letter and is passed over; None also if it was the last one there was, so
        that who reads until `pending` is 0 comes to an end.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            item = await self._reader.next(None if deadline is None else max(0.0, deadline - loop.time()))
            if item is None:
                return None
            raw, place = item
            try:
                message = decode(raw.data, raw.headers)
                if not isinstance(message, self._types):
                    raise DecodeError(f"{type(message).__name__} is not expected on {raw.subject}")
            except DecodeError as error:
                if self._dead_letters is not None:
                    await self._dead_letters.bury(
                        f"{Plane.EVENT}.{place.stream_seq}",
                        subject=raw.subject,
                        reason=str(error),
                        headers=raw.headers,
                        payload=raw.data,
                    )
                if not place.num_pending:
                    return None
                continue
            return Received(message, place.stream_seq, place.time_ns, place.num_pending)

    async def so_far(self) -> AsyncGenerator[Received[MessageT], None]:
        """Those that the log holds by now; ends once the reader has caught up."""
        while self.pending:
            received = await self.next()
            if received is not None:
                yield received

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received[MessageT]:
        while True:
            received = await self.next()
            if received is not None:
                return received


class Bus:
    """One process's place on the bus of a run. Made by `Bus.connect`.

    Every wait here ends: publishing, fetching and asking have deadlines from `limits`. Reading and consuming wait as
    long as the caller does, but not for a server that is gone: that is BusUnavailable after the deadline of a publish.
    If the connection closes for good, the block of `connect` is cancelled.
    """

    def __init__(self, connection: Connection, run: str, name: str) -> None:
        self.run = run
        self.name = name  # of the actor instance, or of the process
        self._connection = connection
        self._limits = connection.limits
        self._store = Store(connection)
        self._dead_letters = DeadLetters(connection, self._store, run)
        self._fetches = asyncio.Semaphore(self._limits.max_fetches)
        self._data_get = f"{API}.DIRECT.GET.{stream_of(run, Plane.DATA)}"
        self._reads: frozenset[type[Message]] | None = None
        self._writes: frozenset[type[Message]] | None = None
        self.kv = KeyValues(connection, self._store, run)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, run: str, *, name: str, limits: BusLimits = DEFAULT_LIMITS
    ) -> AsyncGenerator["Bus", None]:
        """The bus for the duration of a block.

        Args:
            url: nats://[user:password@]host:port, several separated by commas.
            run: the run's name; may exist on the server or not yet.
            name: shown by the server's monitoring.

        Raises:
            BusUnavailable: no server within limits.connect_timeout_s, or the connection closed for good.
            ValueError: the run's name cannot be part of subjects.
        """
        check_run_name(run)
        async with open_connection(url, name=name, limits=limits) as connection:
            yield cls(connection, run, name)

    def for_actor(self, name: str, *, reads: Iterable[type[Message]], writes: Iterable[type[Message]]) -> "Bus":
        """This bus as one actor sees it: it may only read and write what it declared."""
        view = copy.copy(self)
        view.name = name
        view._reads = frozenset(reads)
        view._writes = frozenset(writes)
        return view

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Make this run's streams and bucket, or bring their limits up to date.

        Raises:
            StreamConflict: one exists and differs in what cannot be changed.
            BusError: the server refuses.
        """
        await ensure_streams(self._connection, self.run, limits)

    # storing

    async def publish(self, message: Message) -> int:
        """Store a message on its plane; return its sequence there.

        It is stored at least once: after lost answers rarely twice. Several may be under way at the same time.

        Raises:
            ValueError: this actor does not declare that it writes the type, or the plane stores nothing.
            MessageTooLarge: nothing was sent.
            AlreadyQueued: a work message under this subject still waits; for a task put again that is success.
            StreamFull, PublishTimeout, BusUnavailable: not confirmed within limits.publish_timeout_s.
        """
        self._check_writes(type(message))
        encoded = encode(message)
        return await self._store.put(subject_of(self.run, message), encoded.payload, encoded.headers)

    async def append(self, message: Message, *, expected_last: int) -> int:
        """Store a ledger event if `expected_last` is still the last sequence of the ledger; return its sequence.

        Stored at most once, whatever is lost on the way.

        Raises:
            SequenceMismatch: somebody else wrote first.
            The same as publish.
        """
        self._check_writes(type(message))
        encoded = encode(message)
        encoded.headers[EXPECTED_LAST] = str(expected_last)
        encoded.headers[EXPECTED_LAST_FILTER] = ledger_filter(self.run)
        return await self._store.put(subject_of(self.run, message), encoded.payload, encoded.headers)

    async def purge(self, plane: Plane, *, below_seq: int) -> None:
        """Delete the messages of a plane with lower sequences."""
        await api_call(self._connection, f"STREAM.PURGE.{stream_of(self.run, plane)}", {"seq": below_seq})

    async def state(self, plane: Plane) -> StreamState:
        """What a plane holds."""
        info = await api_call(self._connection, f"STREAM.INFO.{stream_of(self.run, plane)}")
        more = {"max_bytes": info["config"]["max_bytes"], "created": info["created"]}
        return msgspec.convert({**info["state"], **more}, StreamState)

    async def stored(self, plane: Plane, *, below_seq: int) -> AsyncGenerator[StoredMessage, None]:
        """What a plane holds below a sequence, undecoded, in order.

        Raises:
            BusUnavailable: no such stream, or nothing came until the deadline.
        """
        reader = LogReader(self._connection, stream_of(self.run, plane), [plane_filter(self.run, plane)], from_seq=1)
        await reader.open()
        try:
            pending = reader.num_pending
            while pending:
                item = await reader.next(self._limits.publish_timeout_s)
                if item is None:
                    raise BusUnavailable(f"{stream_of(self.run, plane)}: nothing more came to be read")
                raw, place = item
                if place.stream_seq >= below_seq:
                    return
                yield StoredMessage(place.stream_seq, time_of(place.time_ns), dict(raw.headers or {}), raw.data)
                pending = place.num_pending
        finally:
            await reader.close()

    async def last_ledger_seq(self) -> int:
        """Sequence of the last ledger event, 0 before the first."""
        return (await self._store.last_of(stream_of(self.run, Plane.EVENT), ledger_filter(self.run)))[0]

    # reading

    @overload
    def read(self, *, from_seq: int = 1, buries: bool = True) -> AbstractAsyncContextManager[Events[Message]]: ...
    @overload
    def read(
        self, *types: type[MessageT], from_seq: int = 1, buries: bool = True
    ) -> AbstractAsyncContextManager[Events[MessageT]]: ...
    def read(
        self, *types: type[Message], from_seq: int = 1, buries: bool = True
    ) -> AbstractAsyncContextManager[Events[Any]]:
        """Events in log order from a sequence on, for the duration of a block. No types: all of them.

        None is skipped and none comes twice, also across restarts of the server.

        Args:
            buries: whether what cannot be used becomes a dead letter; a mere spectator writes nothing.

        Raises:
            ValueError: this actor does not declare that it reads a type, or it is no event.
            BusUnavailable: no such stream until the deadline.
        """
        for message_type in types or (Message,):
            self._check_reads(message_type)
        if any(message_type.plane is not Plane.EVENT for message_type in types):
            raise ValueError(f"read takes events, got {[tag_of(message_type) for message_type in types]}")
        filters = [filter_of(self.run, message_type) for message_type in types]
        dead_letters = self._dead_letters if buries else None
        filters = filters or [plane_filter(self.run, Plane.EVENT)]
        return self._read(tuple(types) or (Message,), filters, from_seq, dead_letters)

    @asynccontextmanager
    async def _read(
        self, types: tuple[type[MessageT], ...], filters: list[str], from_seq: int, dead_letters: DeadLetters | None
    ) -> AsyncGenerator[Events[MessageT], None]:
        stream = stream_of(self.run, Plane.EVENT)
        reader = LogReader(self._connection, stream, filters, from_seq=max(1, from_seq))
        try:
            await reader.open()
            yield Events(reader, dead_letters, types)
        finally:
            await reader.close()

    @asynccontextmanager
    async def consume(
        self,
        *types: type[MessageT],
        durable: str,
        ack_wait_s: float = 30.0,
        max_ack_pending: int = 1024,
        prefetch: int = 0,
    ) -> AsyncGenerator[Deliveries[MessageT], None]:
        """Work, or events shared by several actors, through a durable consumer, for the duration of a block.

        Args:
            durable: name of the consumer; who uses the same name shares the messages.
            ack_wait_s: after this long without an end or a heartbeat, a delivery goes to somebody else.
            max_ack_pending: deliveries that all users of the consumer together may hold.
            prefetch: messages fetched before anyone waits; 0 gives slow workers no more than they ask for.

        Raises:
            ValueError: this actor does not declare that it reads a type, or the types are of several planes.
            BusUnavailable: no such stream until the deadline.
        """
        planes = {message_type.plane for message_type in types}
        if len(planes) != 1 or not planes <= {Plane.WORK, Plane.EVENT}:
            raise ValueError(f"consume takes types of one plane, work or event, got {sorted(planes)}")
        for message_type in types:
            self._check_reads(message_type)
        plane = planes.pop()
        settings = ConsumerSettings(durable=durable, ack_wait_s=ack_wait_s, max_ack_pending=max_ack_pending)
        deliveries = Deliveries(
            self._connection,
            self._dead_letters,
            plane=plane,
            stream=stream_of(self.run, plane),
            config=settings.to_config([filter_of(self.run, message_type) for message_type in types]),
            types=types,
            prefetch=prefetch,
        )
        await deliveries.open()
        try:
            async with beside(lambda: deliveries.keep_alive(ack_wait_s / 3)):
                yield deliveries
        finally:
            await deliveries.close()

    async def fetch(self, message_type: type[MessageT], seq: int) -> MessageT:
        """A payload by its sequence in the data stream. Several may be under way, up to limits.max_fetches.

        Raises:
            PayloadLost: there is none: purged, or never stored.
            PayloadUnreadable: there is one that cannot be used; it was dead-lettered.
            BusUnavailable: no server until the deadline.
        """
        self._check_reads(message_type)
        async with self._fetches:
            raw = await self._connection.retry(
                self._data_get, b'{"seq":%d}' % seq, None, self._limits.publish_timeout_s
            )
        if raw.headers is not None and raw.headers.get(STATUS) is not None:
            raise PayloadLost(f"{stream_of(self.run, Plane.DATA)} has no message {seq}")
        self._connection.counters.fetched += 1
        try:
            message = decode(raw.data, raw.headers)
            if not isinstance(message, message_type):
                raise DecodeError(f"{type(message).__name__} where {message_type.__name__} is expected")
        except DecodeError as error:
            subject = (raw.headers or {}).get("Nats-Subject", "")
            await self._dead_letters.bury(
                f"{Plane.DATA}.{seq}", subject=subject, reason=str(error), headers=raw.headers, payload=raw.data
            )
            raise PayloadUnreadable(f"message {seq}: {error}") from error
        return message

    # asking

    @overload
    async def call(self, instance: str, request: Message, *, timeout_s: float) -> Message: ...
    @overload
    async def call(self, instance: str, request: Message, answer: type[MessageT], *, timeout_s: float) -> MessageT: ...
    async def call(
        self, instance: str, request: Message, answer: type[Message] = Message, *, timeout_s: float
    ) -> Message:
        """Ask one actor instance and wait.

        Raises:
            CallTimeout, NotServed, CallRefused: each a CallError.
        """
        reply = await ask(self._connection, self.run, instance, request, timeout_s)
        if not isinstance(reply, answer):
            raise CallRefused(f"{instance} answered with {type(reply).__name__}, expected {answer.__name__}")
        return reply

    def serve(
        self, handlers: Mapping[type[Message], Handler], *, instance: str = ""
    ) -> "AbstractAsyncContextManager[None]":
        """Answer calls to an instance (this actor's own unless named) for the duration of a block.

        What a handler raises goes to the caller as CallFailed; so does what cannot be decoded, which is also
        dead-lettered.
        """
        return serve(self._connection, self._dead_letters, self.run, instance or self.name, handlers)

    async def notify(self, message: Message, *, to: str) -> None:
        """Send a small answer to an inbox. Not stored: if nobody listens or the connection is down, it may be lost.

        Raises:
            ValueError: this actor does not declare that it writes the type.
            MessageTooLarge: nothing was sent.
            Disconnected: a BusError, when the outage outgrew the send buffer.
        """
        self._check_writes(type(message))
        encoded = encode(message)
        await self._connection.send(to, encoded.payload, encoded.headers)

    @asynccontextmanager
    async def inbox(self, message_type: type[MessageT], *, bound: int = 4096) -> AsyncGenerator[Inbox[MessageT], None]:
        """A private subject for answers of one type, for the duration of a block. Over `bound` they are dropped."""
        self._check_reads(message_type)
        inbox = Inbox(self._connection, self._dead_letters, message_type, bound)
        listener = await self._connection.subscribe(inbox.subject, inbox.on_message)
        try:
            yield inbox
        finally:
            await listener.stop()

    def stats(self) -> dict[str, float]:
        """Counters of this connection since it was opened."""
        return {
            f"bus/{name}": float(value) for name, value in msgspec.structs.asdict(self._connection.counters).items()
        }

    # declared types

    def _check_writes(self, message_type: type[Message]) -> None:
        if self._writes is not None and message_type not in self._writes:
            raise ValueError(f"{self.name} does not declare that it writes {message_type.__name__}")

    def _check_reads(self, message_type: type[Message]) -> None:
        if self._reads is not None and message_type not in self._reads:
            raise ValueError(f"{self.name} does not declare that it reads {message_type.__name__}")
