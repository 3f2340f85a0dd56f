"""The typed bus of one run: publish, append, read, consume, fetch, call. Callers see no subjects or bytes."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, overload

import msgspec

from messages import DecodeError, Message, MessageT, Plane, ScoreRequested, ScoresGiven, decode_as, tag_of
from messages.subjects import (
    check_run_name,
    event_filters,
    filter_of,
    inbox_prefix,
    is_inbox,
    key_subject,
    scores_token,
    stream_of,
    subject_of,
)
from runtime.bus import scoring
from runtime.bus.administration import Administration, Holdings, StreamState
from runtime.bus.background import in_background
from runtime.bus.calls import MAX_ANSWERS, Handler, Inbox, ask, serve
from runtime.bus.consumer import Deliveries, opened
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import CallRefused, MessageRefused, PayloadLost, PayloadUnreadable
from runtime.bus.events import Events, Log, StoredMessage
from runtime.bus.kv import KeyValues
from runtime.bus.limits import BusLimits, StreamLimits
from runtime.bus.nats.connection import Connection, open_connection
from runtime.bus.nats.consumers import ConsumerSettings
from runtime.bus.nats.room import Room
from runtime.bus.nats.store import Store, Stored, is_in_service
from runtime.bus.wire import to_wire

DEFAULT_LIMITS: Final = BusLimits()


class Bus:
    """One process's client of a run's bus. Created by `Bus.connect`.

    Every wait is bounded: publishing, fetching and calling have deadlines from `limits`. Reading and consuming wait as
    long as the caller does. If the server is gone, they raise BusUnavailable after the deadline of a publish. If the
    connection closes for good, the block of `connect` is cancelled. limits.outage_s of a lost connection do not count
    against the deadlines of `limits`; those of calls run on.
    """

    def __init__(self, connection: Connection, run: str, name: str) -> None:
        self.run = run
        self.name = name  # of the actor instance or process
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
        cls, url: str, run: str, *, name: str, limits: BusLimits = DEFAULT_LIMITS, certificate: str | None = None
    ) -> AsyncGenerator["Bus", None]:
        """Connect to the bus for the duration of a block.

        Args:
            url: nats://[user:password@]host:port; several are separated by commas.
            run: name of the run, which need not exist on the server yet.
            name: shown in the server's monitoring.
            limits: deadlines and buffer bounds.
            certificate: PEM certificate of a run's own server, which alone is trusted.

        Raises:
            BusUnavailable: no server answers within limits.connect_timeout_s, or the connection closes for good.
            ValueError: the run's name is invalid in subjects.
        """
        check_run_name(run)
        async with open_connection(
            url, name=name, limits=limits, inboxes=inbox_prefix(run, name), certificate=certificate
        ) as connection:
            bus = cls(connection, run, name)
            watch = partial(connection.outages.watch, partial(is_in_service, connection, stream_of(run, Plane.EVENT)))
            async with in_background(bus._room.keep_current), in_background(watch):
                yield bus

    def for_actor(self, name: str, *, reads: Iterable[type[Message]], writes: Iterable[type[Message]]) -> "Bus":
        """This bus restricted to one actor: it can only read and write the types that the actor declares."""
        view = copy.copy(self)
        view.name = name
        view._reads = frozenset(reads)
        view._writes = frozenset(writes)
        return view

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Create this run's streams and bucket, or update their limits.

        Raises:
            StreamConflict: a stream exists with other settings that cannot be changed.
            BusError: the server refuses.
        """
        await self._administration.ensure_streams(limits)

    async def ensure_score_queues(self, graders: Iterable[str]) -> None:
        """Create the queues of score requests, without requests: one per grader, and one of the run's own actors.

        Only for the start of a run, before its actors.

        Raises:
            BusError: the server refuses or does not answer.
        """
        await scoring.ensure_queues(self._connection, self.run, graders)

    async def missing_rights(self) -> list[str]:
        """Rights that the login of this run lacks on the server, each as a verb and subjects. Changes nothing there.

        Raises:
            BusUnavailable: the server does not answer.
        """
        return await self._administration.missing_rights()

    async def holdings(self) -> Holdings:
        """State of this run's streams and bucket on the server. Creates nothing.

        Raises:
            BusError: the server refuses or does not answer.
        """
        return await self._administration.holdings()

    async def delete_streams(self) -> None:
        """Delete this run's streams, their consumers and its bucket, if they exist.

        Raises:
            BusError: the server refuses or does not answer.
        """
        await self._administration.delete_streams()

    # storing

    async def publish(self, message: Message) -> int:
        """Store a message on its plane, and return its sequence there.

        Delivery is at least once; duplicates are rare and only follow a lost answer. Calls can run concurrently. An
        event waits while the log is nearly full: the last part is reserved for writers that can empty it.

        Raises:
            ValueError: the actor does not declare that it writes the type, or the plane stores nothing.
            MessageRefused: nothing was sent; MessageTooLarge is a subclass.
            AlreadyQueued: the work stream holds a message under this subject; for a requeued task this is success.
            StreamFull, PublishTimeout, BusUnavailable: not confirmed within limits.publish_timeout_s.
        """
        self._check_writes(type(message))
        encoded = to_wire(message)
        if message.plane is Plane.EVENT and not self._room.take(message, len(encoded.payload)):
            await self._room.wait_and_take(len(encoded.payload))
        return await self._store.put(subject_of(self.run, message), encoded.payload, encoded.headers)

    async def flush(self) -> None:
        """Wait until the server has processed all that was sent, such as acknowledgements.

        Raises:
            BusUnavailable: it does not answer.
        """
        await self._connection.flush()

    async def withdraw(self, seq: int) -> None:
        """Remove a task of this run from the work stream, if it is still there: its caller no longer waits.

        A worker that has the task finishes it.

        Raises:
            BusUnavailable: no server until the deadline.
        """
        await self._administration.delete_message(Plane.WORK, seq)

    async def append(self, message: Message, *, expected_last: int) -> int:
        """Store a ledger event if `expected_last` is still the last sequence of the ledger; return its sequence.

        Stored at most once, even if answers are lost.

        Raises:
            SequenceMismatch: another process wrote first.
            ValueError, MessageRefused, StreamFull, PublishTimeout, BusUnavailable: as `publish`.
        """
        self._check_writes(type(message))
        return await self._log.append(message, expected_last=expected_last)

    async def purge(self, plane: Plane, *, below_seq: int) -> None:
        """Delete the messages of a plane below a sequence."""
        await self._administration.purge(plane, below_seq=below_seq)

    async def state(self, plane: Plane) -> StreamState:
        """State of a plane's stream."""
        return await self._administration.state(plane)

    async def widen(self, plane: Plane, *, to_bytes: int) -> None:
        """Raise the byte limit of a plane's stream, unless it is that high. The next `ensure_streams` resets it."""
        await self._administration.widen(plane, to_bytes=to_bytes)

    def stored(self, plane: Plane, *, below_seq: int) -> AsyncGenerator[StoredMessage, None]:
        """The messages of a plane below a sequence, undecoded, in order.

        Raises:
            BusUnavailable: no such stream, or no message until the deadline.
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
        """Read events in log order from a sequence on, for the duration of a block. Without types: all events.

        Events are never skipped or repeated, even across restarts of the server. A reader of all ledger types reads the
        whole ledger: an event of an unknown type in it ends the reader.

        Args:
            types: event types to read.
            from_seq: first sequence; if above 1, the log must reach back to it.
            buries: whether unusable events are dead-lettered. Observers write nothing.
            skips: whether events may be skipped that are trimmed from the log before they are read.

        Raises:
            ValueError: the actor does not declare that it reads a type, or the type is not an event.
            BusUnavailable: no such stream until the deadline.
            LogTrimmedAway: the log no longer reaches back to from_seq.
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
        prefetch_by_rate: bool = False,
        keeps_prefetched: bool = False,
    ) -> AsyncGenerator[Deliveries[MessageT], None]:
        """Receive work, or events shared by several actors, through a durable consumer, for the duration of a block.

        Args:
            types: message types of one plane.
            durable: name of the consumer; all users of one name share its messages.
            ack_wait_s: a delivery without an end or a heartbeat for this long is redelivered.
            max_ack_pending: maximum of open deliveries of all users of the consumer.
            prefetch: messages to fetch ahead of demand. 0: only on demand, so that slow workers hold no messages.
            prefetch_by_rate: whether to fetch ahead as many messages as this process ended in the busiest of the last
                seconds. Quick workers then wait for no request, and slow workers hold no messages.
            keeps_prefetched: whether to keep messages that no task takes for long, where no other process would take
                them sooner. Otherwise they are returned for redelivery.

        Raises:
            ValueError: the actor does not declare that it reads a type, or the types are of several planes.
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
            prefetch_by_rate=prefetch_by_rate,
            keeps_prefetched=keeps_prefetched,
        )
        async with opened(deliveries, ack_wait_s):
            yield deliveries

    @asynccontextmanager
    async def consume_scoring(
        self, grader_token: str, *, ack_wait_s: float = scoring.ACK_WAIT_S
    ) -> AsyncGenerator[Deliveries[ScoreRequested], None]:
        """Receive the score requests of one grader, for the duration of a block.

        Raises:
            ValueError: the actor does not declare that it reads score requests.
            BusUnavailable: no such stream until the deadline.
        """
        self._check_reads(ScoreRequested)
        deliveries = Deliveries(
            self._connection,
            self._dead_letters,
            plane=Plane.WORK,
            stream=stream_of(self.run, Plane.WORK),
            settings=scoring.queue_settings(self.run, grader_token, ack_wait_s=ack_wait_s),
            types=(ScoreRequested,),
            prefetch=0,
            prefetch_by_rate=True,
            keeps_prefetched=False,
        )
        async with opened(deliveries, ack_wait_s):
            yield deliveries

    async def fetch(self, message_type: type[MessageT], seq: int, *, buries: bool = True) -> MessageT:
        """Fetch a payload by its sequence in the data stream. Up to limits.max_fetches fetches run concurrently.

        Args:
            message_type: type of the payload.
            seq: its sequence.
            buries: whether an unusable message is dead-lettered. Observers write nothing.

        Raises:
            PayloadLost: no message has this sequence: purged, or never stored.
            PayloadUnreadable: the message cannot be used.
            BusUnavailable: no server until the deadline.
        """
        self._check_reads(message_type)
        async with self._fetches:
            stored = await self._store.get(self._data_stream, seq)
        return await self._payload(message_type, stored, f"message {seq}", buries=buries)

    async def fetch_by_key(self, message_type: type[MessageT], key: str) -> MessageT:
        """Fetch the newest payload with this key from the data stream. Errors are those of `fetch`."""
        self._check_reads(message_type)
        subject = key_subject(self.run, message_type, key)
        async with self._fetches:
            stored = await self._store.get_by_subject(self._data_stream, subject)
        return await self._payload(message_type, stored, f"message under {subject}")

    async def _payload(
        self, message_type: type[MessageT], stored: Stored | None, name: str, *, buries: bool = True
    ) -> MessageT:
        if stored is None:
            raise PayloadLost(f"{self._data_stream} has no {name}")
        self._connection.counters.fetched += 1
        try:
            return decode_as(message_type, stored.data, stored.headers)
        except DecodeError as error:
            if buries:
                await self._dead_letters.bury(
                    f"{Plane.DATA}.{stored.seq}",
                    subject=stored.subject,
                    reason=str(error),
                    headers=stored.headers,
                    payload=stored.data,
                )
            raise PayloadUnreadable(f"{name}: {error}") from error

    # calling

    @overload
    async def call(self, instance: str, request: Message, *, timeout_s: float) -> Message: ...
    @overload
    async def call(self, instance: str, request: Message, answer: type[MessageT], *, timeout_s: float) -> MessageT: ...
    async def call(
        self, instance: str, request: Message, answer: type[Message] = Message, *, timeout_s: float
    ) -> Message:
        """Call one actor instance and wait for the answer.

        Raises:
            CallTimeout, NotServed, CallRefused: the call failed; each is a CallError.
        """
        reply = await ask(self._connection, self.run, instance, request, timeout_s)
        if not isinstance(reply, answer):
            raise CallRefused(f"{instance} answered with {type(reply).__name__}, expected {answer.__name__}")
        return reply

    def serve(
        self, handlers: Mapping[type[Message], Handler], *, instance: str = ""
    ) -> "AbstractAsyncContextManager[None]":
        """Answer calls to an instance (by default this actor's own) for the duration of a block.

        An error of a handler goes to the caller as CallFailed. So does a request that cannot be decoded; it is also
        dead-lettered.
        """
        return serve(self._connection, self._dead_letters, self.run, instance or self.name, handlers)

    async def notify(self, message: Message, *, to: str) -> None:
        """Send a small answer to an inbox or a subject for scores.

        It is not stored, and is lost without a listener or a connection.

        Raises:
            ValueError: the actor does not declare that it writes the type.
            MessageRefused: `to` takes no answers of this run, or the message is too large; nothing was sent.
            Disconnected: the send buffer is full in an outage; a BusError.
        """
        self._check_writes(type(message))
        if not is_inbox(self.run, to) and scores_token(self.run, to) is None:
            raise MessageRefused(f"{to[:80]!r} is not an inbox of run {self.run}")
        encoded = to_wire(message)
        await self._connection.send(to, encoded.payload, encoded.headers)

    @asynccontextmanager
    async def inbox(
        self, message_type: type[MessageT], *, bound: int = MAX_ANSWERS
    ) -> AsyncGenerator[Inbox[MessageT], None]:
        """A private subject for answers of one type, for the duration of a block. Drops answers over `bound`."""
        self._check_reads(message_type)
        inbox = Inbox(self._connection, self._dead_letters, message_type, bound)
        async with self._listening(inbox):
            yield inbox

    @asynccontextmanager
    async def score_inbox(self, token_of: Callable[[str], str | None]) -> AsyncGenerator[scoring.ScoreInbox, None]:
        """The answers to this process's score requests, for the duration of a block.

        Args:
            token_of: returns the grader's token of a request by its id; None for a request that has ended.
        """
        self._check_reads(ScoresGiven)
        inbox = scoring.ScoreInbox(self._connection, self._dead_letters, self.run, token_of)
        async with self._listening(inbox):
            yield inbox

    @asynccontextmanager
    async def _listening(self, inbox: Inbox[Any]) -> AsyncGenerator[None, None]:
        listener = await self._connection.subscribe(inbox.subject, inbox.on_message)
        try:
            yield
        finally:
            await listener.stop()

    def takes_scores(self, subject: str, grader_token: str) -> bool:
        """Whether a subject received over the bus takes the answers of this grader."""
        return scores_token(self.run, subject) == grader_token

    @property
    def away_s(self) -> float:
        """Seconds since the connection was lost; 0 while there is one."""
        return self._connection.outages.away_s

    @property
    def back_s(self) -> float:
        """Seconds since the last outage ended; infinite if there was none."""
        return self._connection.outages.back_s

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
