"""The event log: append with compare-and-set, read in order, and read undecoded."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Generic, Self

import msgspec

from messages import DecodeError, Message, MessageT, Plane, decode
from messages.base import VERSION
from messages.codec import VERSION_HEADER, UnknownType
from messages.subjects import is_known_event, is_ledger, ledger_filter, plane_filter, stream_of, subject_of
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import BusUnavailable, UnknownDecision
from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.pull import time_of
from runtime.bus.nats.store import Store
from runtime.bus.reader import LogReader
from runtime.bus.wire import to_wire


class Received(Generic[MessageT]):
    """A message read from a log."""

    __slots__ = ("message", "pending", "seq", "time")

    def __init__(self, message: MessageT, seq: int, time: datetime, pending: int) -> None:
        self.message = message
        self.seq = seq  # sequence in the stream
        self.pending = pending  # later messages when it was sent; 0: the reader caught up
        self.time = time  # at which the server stored it, in whole microseconds, as archives have it

    @property
    def unix_time(self) -> float:
        """The same as Unix time in seconds."""
        return self.time.timestamp()

    def __repr__(self) -> str:
        return f"Received(seq={self.seq}, pending={self.pending}, message={self.message!r})"


class StoredMessage(msgspec.Struct, frozen=True):
    """A message of a stream, undecoded."""

    seq: int
    time: datetime
    headers: dict[str, str]
    payload: bytes


class Events(Generic[MessageT]):
    """A reader of events in log order, created by `Log.read`."""

    def __init__(self, reader: LogReader, dead_letters: DeadLetters | None, types: tuple[type[MessageT], ...]) -> None:
        self._reader = reader
        self._dead_letters = dead_letters  # None: skip unusable messages without a dead letter
        self._types = types

    @property
    def pending(self) -> int:
        """Number of events to read, as last known: at the start, then with each event."""
        return self._reader.num_pending

    async def next(self, timeout_s: float | None = None) -> Received[MessageT] | None:
        """The next event, or None after timeout_s.

        Skips unusable events, and dead-letters those under a subject of a known type. Returns None also if the last
        pending event was unusable, so that a reader until `pending` is 0 ends.

        Raises:
            UnknownDecision: the ledger holds an event of a type that this version does not know.
            LogTrimmedAway: unread events are gone.
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
                await self._pass_over(raw, place.stream_seq, error)
                if not place.num_pending:
                    return None
                continue
            return Received(message, place.stream_seq, time_of(place.time_ns), place.num_pending)

    async def _pass_over(self, raw: RawMessage, seq: int, error: DecodeError) -> None:
        """Skip an unusable event. Ignores external subjects, but not the ledger, which every reader must know.

        Raises:
            UnknownDecision: a ledger event has a type that this version does not know.
        """
        if isinstance(error, UnknownType) and is_ledger(raw.subject):
            version = (raw.headers or {}).get(VERSION_HEADER, "unknown")
            raise UnknownDecision(
                f"event {seq} on {raw.subject} has the unknown type {error.tag!r}: version {version} of the messages "
                f"wrote it, this is version {VERSION}. A ledger without it is wrong: use the version that wrote it"
            )
        if self._dead_letters is None or not (is_known_event(raw.subject) or is_ledger(raw.subject)):
            return
        await self._dead_letters.bury(
            f"{Plane.EVENT}.{seq}", subject=raw.subject, reason=str(error), headers=raw.headers, payload=raw.data
        )

    async def so_far(self) -> AsyncGenerator[Received[MessageT], None]:
        """The events stored by now. Ends once the reader caught up.

        In a cluster, the server that sends them may lag behind the leader. The newest events then follow later.
        """
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


class Log:
    """Appends and reads the events of a bus, in log order."""

    def __init__(self, connection: Connection, store: Store, dead_letters: DeadLetters, run: str) -> None:
        self._connection = connection
        self._store = store
        self._dead_letters = dead_letters
        self._run = run
        self._stream = stream_of(run, Plane.EVENT)

    async def append(self, message: Message, *, expected_last: int) -> int:
        """Store a ledger event if `expected_last` is still the last sequence of the ledger; return its sequence."""
        encoded, within = to_wire(message), ledger_filter(self._run)
        encoded.headers[VERSION_HEADER] = str(VERSION)
        return await self._store.put(
            subject_of(self._run, message),
            encoded.payload,
            encoded.headers,
            expected_last=expected_last,
            within=within,
        )

    async def last_ledger_seq(self) -> int:
        """Sequence of the last ledger event, 0 before the first."""
        return (await self._store.last_of(self._stream, ledger_filter(self._run)))[0]

    @asynccontextmanager
    async def read(
        self, types: tuple[type[MessageT], ...], filters: Sequence[str], *, from_seq: int, buries: bool, skips: bool
    ) -> AsyncGenerator[Events[MessageT], None]:
        """Read events of some types in order, for the duration of a block."""
        reader = LogReader(self._connection, self._stream, filters, from_seq=max(1, from_seq), skips=skips)
        try:
            await reader.open()
            yield Events(reader, self._dead_letters if buries else None, types)
        finally:
            await reader.close()

    async def stored(self, plane: Plane, *, below_seq: int) -> AsyncGenerator[StoredMessage, None]:
        """The messages of a plane below a sequence, undecoded, in order.

        Raises:
            BusUnavailable: no such stream, or no message until the deadline.
        """
        stream = stream_of(self._run, plane)
        reader = LogReader(self._connection, stream, [plane_filter(self._run, plane)], from_seq=1)
        await reader.open()
        try:
            pending = reader.num_pending
            while pending:
                item = await reader.next(self._connection.limits.publish_timeout_s)
                if item is None and self._connection.outages.is_allowed:
                    continue
                if item is None and not reader.num_pending:
                    return  # deleted meanwhile
                if item is None:
                    raise BusUnavailable(
                        f"{stream}: no further message arrived within {self._connection.limits.publish_timeout_s:g} s"
                    )
                raw, place = item
                if place.stream_seq >= below_seq:
                    return
                yield StoredMessage(place.stream_seq, time_of(place.time_ns), dict(raw.headers or {}), raw.data)
                pending = place.num_pending
        finally:
            await reader.close()
