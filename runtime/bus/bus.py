"""The typed bus of one run: publish, append, read, consume, fetch, call. Subjects and bytes stay below this."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, overload

import msgspec

from messages import DecodeError, Message, MessageT, Plane, decode, tag_of
from messages.subjects import check_run_name, event_filters, filter_of, inbox_prefix, is_inbox, stream_of, subject_of
from runtime.bus.administration import Administration, Holdings, StreamState
from runtime.bus.background import beside
from runtime.bus.calls import Handler, Inbox, ask, serve
from runtime.bus.consumer import Deliveries
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import CallRefused, MessageRefused, PayloadLost, PayloadUnreadable
from runtime.bus.events import Events, Log, StoredMessage
from runtime.bus.kv import KeyValues
from runtime.bus.limits import BusLimits, StreamLimits
from runtime.bus.nats.connection import Connection, open_connection
from runtime.bus.nats.consumers import ConsumerSettings
from runtime.bus.nats.room import Room
from runtime.bus.nats.store import Store
from runtime.bus.wire import to_wire

DEFAULT_LIMITS: Final = BusLimits()


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
        self._data_stream = stream_of(run, Plane.DATA)
        self._room = Room(connection, stream_of(run, Plane.EVENT))
        self._log = Log(connection, self._store, self._dead_letters, run)
        self._administration = Administration(connection, run)
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
        async with open_connection(url, name=name, limits=limits, inboxes=inbox_prefix(run, name)) as connection:
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
        await self._administration.ensure_streams(limits)

    async def holdings(self) -> Holdings:
        """What the server has of this run's streams and bucket; nothing is made.

        Raises:
            BusError: the server refuses, or none answers.
        """
        return await self._administration.holdings()

    async def delete_streams(self) -> None:
        """Delete this run's streams, their consumers and its bucket. What is not there is not missed.

        Raises:
            BusError: the server refuses, or none answers.
        """
        await self._administration.delete_streams()

    # storing

    async def publish(self, message: Message) -> int:
        """Store a message on its plane; return its sequence there.

        It is stored at least once: after lost answers rarely twice. Several may be under way at the same time. An event
        waits while the log has no room but the part that is kept for those who can empty it.

        Raises:
            ValueError: this actor does not declare that it writes the type, or the plane stores nothing.
            MessageRefused: nothing was sent; MessageTooLarge is one.
            AlreadyQueued: a work message under this subject still waits; for a task put again that is success.
            StreamFull, PublishTimeout, BusUnavailable: not confirmed within limits.publish_timeout_s.
        """
        self._check_writes(type(message))
        encoded = to_wire(message)
        if message.plane is Plane.EVENT and not self._room.take(message, len(encoded.payload)):
            await self._room.wait_and_take(len(encoded.payload))
        return await self._store.put(subject_of(self.run, message), encoded.payload, encoded.headers)

    async def append(self, message: Message, *, expected_last: int) -> int:
        """Store a ledger event if `expected_last` is still the last sequence of the ledger; return its sequence.

        Stored at most once, whatever is lost on the way.

        Raises:
            SequenceMismatch: somebody else wrote first.
            The same as publish.
        """
        self._check_writes(type(message))
        return await self._log.append(message, expected_last=expected_last)

    async def purge(self, plane: Plane, *, below_seq: int) -> None:
        """Delete the messages of a plane with lower sequences."""
        await self._administration.purge(plane, below_seq=below_seq)

    async def state(self, plane: Plane) -> StreamState:
        """What a plane holds."""
        return await self._administration.state(plane)

    async def widen(self, plane: Plane, *, to_bytes: int) -> None:
        """Raise the limit of a plane's stream, unless it is as high already, until `ensure_streams` sets it again."""
        await self._administration.widen(plane, to_bytes=to_bytes)

    def stored(self, plane: Plane, *, below_seq: int) -> AsyncGenerator[StoredMessage, None]:
        """What a plane holds below a sequence, undecoded, in order.

        Raises:
            BusUnavailable: no such stream, or nothing came until the deadline.
        """
        return self._log.stored(plane, below_seq=below_seq)

    async def last_ledger_seq(self) -> int:
        """Sequence of the last ledger event, 0 before the first."""
        return await self._log.last_ledger_seq()

    # reading

    @overload
    def read(
        self, *, from_seq: int = 1, buries: bool = True, skips: bool = False
    ) -> AbstractAsyncContextManager[Events[Message]]: ...
    @overload
    def read(
        self, *types: type[MessageT], from_seq: int = 1, buries: bool = True, skips: bool = False
    ) -> AbstractAsyncContextManager[Events[MessageT]]: ...
    def read(
        self, *types: type[Message], from_seq: int = 1, buries: bool = True, skips: bool = False
    ) -> AbstractAsyncContextManager[Events[Any]]:
        """Events in log order from a sequence on, for the duration of a block. No types: all of them.

        None is skipped and none comes twice, also across restarts of the server. Who reads all of the ledger's types
        reads the ledger whole: an event in there of a type that this version does not know ends the reader.

        Args:
            from_seq: above 1, the log must reach back so far.
            buries: whether what cannot be used becomes a dead letter; a mere spectator writes nothing.
            skips: whether what is trimmed from the log before it was read may be passed over.

        Raises:
            ValueError: this actor does not declare that it reads a type, or it is no event.
            BusUnavailable: no such stream until the deadline.
            LogTrimmedAway: the log does not reach back to from_seq any more.
        """
        for message_type in types or (Message,):
            self._check_reads(message_type)
        if any(message_type.plane is not Plane.EVENT for message_type in types):
            raise ValueError(f"read takes events, got {[tag_of(message_type) for message_type in types]}")
        return self._log.read(
            tuple(types) or (Message,), event_filters(self.run, types), from_seq=from_seq, buries=buries, skips=skips
        )

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
        settings = ConsumerSettings(
            durable=durable,
            filters=tuple(filter_of(self.run, message_type) for message_type in types),
            ack_wait_s=ack_wait_s,
            max_ack_pending=max_ack_pending,
        )
        deliveries = Deliveries(
            self._connection,
            self._dead_letters,
            plane=plane,
            stream=stream_of(self.run, plane),
            settings=settings,
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
            stored = await self._store.get(self._data_stream, seq)
        if stored is None:
            raise PayloadLost(f"{self._data_stream} has no message {seq}")
        self._connection.counters.fetched += 1
        try:
            message = decode(stored.data, stored.headers)
            if not isinstance(message, message_type):
                raise DecodeError(f"{type(message).__name__} where {message_type.__name__} is expected")
        except DecodeError as error:
            await self._dead_letters.bury(
                f"{Plane.DATA}.{seq}",
                subject=stored.subject,
                reason=str(error),
                headers=stored.headers,
                payload=stored.data,
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

    def is_inbox(self, subject: str) -> bool:
        """Whether a subject that came over the bus is one where a client of this run takes answers."""
        return is_inbox(self.run, subject)

    async def notify(self, message: Message, *, to: str) -> None:
        """Send a small answer to an inbox. Not stored: if nobody listens or the connection is down, it may be lost.

        Raises:
            ValueError: this actor does not declare that it writes the type.
            MessageRefused: `to` is no inbox of this run, or the message too large; nothing was sent.
            Disconnected: a BusError, when the outage outgrew the send buffer.
        """
        self._check_writes(type(message))
        if not self.is_inbox(to):
            raise MessageRefused(f"{to[:80]!r} is no inbox of run {self.run}")
        encoded = to_wire(message)
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
