"""A run's key-value bucket: small shared facts such as addresses, claims and the roster, as JSON."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from messages.plain import UNREADABLE
from messages.subjects import bucket_of
from runtime.bus.errors import PayloadUnreadable
from runtime.bus.nats.bucket import Bucket, is_removal
from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.pull import Place
from runtime.bus.nats.store import TOO_MANY, ApiFailed, Store
from runtime.bus.reader import LogReader

log = structlog.get_logger()

T = TypeVar("T")
CLOCK_KEY_TTL_S: Final = 10


class Entry(Generic[T]):
    """A key and its value at one revision. The value is None if the key was deleted."""

    __slots__ = ("key", "revision", "value")

    def __init__(self, key: str, value: T | None, revision: int) -> None:
        self.key = key
        self.value = value
        self.revision = revision


class KeyValues:
    """Reads and writes the KV bucket of one run, with typed values."""

    def __init__(self, connection: Connection, store: Store, run: str) -> None:
        self._connection = connection
        self._bucket = Bucket(store, bucket_of(run))

    async def get(self, key: str, value_type: type[T]) -> Entry[T] | None:
        """The latest value; None if the key has none.

        Raises:
            PayloadUnreadable: the value does not fit the type.
            BusUnavailable: no server.
        """
        kept = await self._bucket.last(key)
        if kept is None or kept.value is None:
            return None
        return Entry(key, self._decode(key, kept.value, value_type), kept.revision)

    async def put(self, key: str, value: Any, *, ttl_s: int | None = None) -> int:
        """Set a value unconditionally; return its revision. It expires after ttl_s."""
        return await self._bucket.put(key, msgspec.json.encode(value), ttl_s=ttl_s)

    async def create(self, key: str, value: Any, *, ttl_s: int | None = None) -> int:
        """Set a value if the key has none.

        Raises:
            SequenceMismatch: the key has a value.
        """
        kept = await self._bucket.last(key)
        revision = kept.revision if kept is not None and kept.value is None else 0
        return await self._bucket.put(key, msgspec.json.encode(value), revision=revision, ttl_s=ttl_s)

    async def update(self, key: str, value: Any, revision: int, *, ttl_s: int | None = None) -> int:
        """Set a value if the key is still at this revision.

        Raises:
            SequenceMismatch: the key is at another revision.
        """
        return await self._bucket.put(key, msgspec.json.encode(value), revision=revision, ttl_s=ttl_s)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Remove a key, if it is still at this revision.

        Raises:
            SequenceMismatch: the key is at another revision.
        """
        await self._bucket.remove(key, revision=revision)

    async def clock_ahead_s(self, key: str) -> float:
        """Return by how many seconds this machine's clock is ahead of the server's, give or take a round trip.

        Args:
            key: key of the caller's own, which is written and expires.

        Raises:
            BusUnavailable: no server.
        """
        before = time.time()
        await self._bucket.put(key, b"null", ttl_s=CLOCK_KEY_TTL_S)
        after = time.time()
        stored_at = await self._bucket.stored_at(key)
        return 0.0 if stored_at is None else (before + after) / 2 - stored_at

    async def entries(self, key_filter: str, value_type: type[T]) -> list[Entry[T]]:
        """All current values under a filter such as "nodes.*" or "engines.>"."""
        return [entry async for entry in self._read(key_filter, value_type) if entry.value is not None]

    async def _read(self, key_filter: str, value_type: type[T]) -> AsyncGenerator[Entry[T], None]:
        """Read all keys under a filter, removed ones included, by revision."""
        reader = self._reader(key_filter)
        await reader.open()
        try:
            while reader.num_pending > 0:
                item = await reader.next(self._connection.limits.publish_timeout_s)
                if item is None and self._connection.outages.is_allowed:
                    continue
                if item is None:
                    break
                entry = self.entry_of(item[0], item[1], value_type)
                if entry is not None:
                    yield entry
        finally:
            await reader.close()

    async def latest(self, key_filter: str, value_type: type[T]) -> list[Entry[T]]:
        """All keys under a filter, removed ones included, by revision. One round trip for up to 1024 keys.

        Raises:
            BusUnavailable: no server.
        """
        try:
            states = await self._bucket.last_of_each(key_filter)
        except ApiFailed as error:
            if error.code != TOO_MANY:
                raise
            return [entry async for entry in self._read(key_filter, value_type)]
        found: list[Entry[T]] = []
        for key, kept in states:
            try:
                value = None if kept.value is None else self._decode(key, kept.value, value_type)
            except PayloadUnreadable as error:
                log.warning("kv_entry_unreadable", key=key, error=str(error))
                continue
            found.append(Entry(key, value, kept.revision))
        return found

    @asynccontextmanager
    async def changes(
        self, key: str, value_type: type[T], note: Callable[[T | None], None]
    ) -> AsyncGenerator[None, None]:
        """Call a function with each value that any process writes to a key, for the duration of a block.

        The value is None if the key is removed. This needs no consumer on the server, and is a hint only. A reconnect
        loses some changes, an expiry is not reported, and a write that the server refuses is reported too.
        """

        def hear(raw: RawMessage) -> None:
            try:
                note(None if is_removal(raw.headers) else self._decode(key, raw.data, value_type))
            except PayloadUnreadable as error:
                log.warning("kv_entry_unreadable", key=key, error=str(error))

        listener = await self._connection.subscribe(self._bucket.subject(key), hear)
        try:
            yield
        finally:
            await listener.stop()

    @asynccontextmanager
    async def watch(self, key_filter: str, value_type: type[T]) -> AsyncGenerator["Watch[T]", None]:
        """Current values under a filter, then every change. Quick successive changes may be merged."""
        reader = self._reader(key_filter)
        await reader.open()
        try:
            yield Watch(self, reader, value_type)
        finally:
            await reader.close()

    def _reader(self, key_filter: str) -> LogReader:
        return LogReader(self._connection, self._bucket.stream, [self._bucket.subject(key_filter)], from_seq=None)

    def _decode(self, key: str, data: bytes, value_type: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=value_type)
        except UNREADABLE as error:
            raise PayloadUnreadable(f"key {key}: {error}") from error

    def entry_of(self, raw: RawMessage, place: Place, value_type: type[T]) -> Entry[T] | None:
        """Decode a stored change; None if it is unreadable."""
        key = self._bucket.key(raw.subject)
        if is_removal(raw.headers):
            return Entry(key, None, place.stream_seq)
        try:
            return Entry(key, self._decode(key, raw.data, value_type), place.stream_seq)
        except PayloadUnreadable as error:
            log.warning("kv_entry_unreadable", key=key, error=str(error))
            return None


class Watch(Generic[T]):
    """Changes of some keys, in order."""

    def __init__(self, bucket: KeyValues, reader: LogReader, value_type: type[T]) -> None:
        self._bucket = bucket
        self._reader = reader
        self._value_type = value_type

    @property
    def num_pending(self) -> int:
        """Number of entries to read now; 0: caught up."""
        return self._reader.num_pending

    async def next(self, timeout_s: float | None = None) -> Entry[T] | None:
        """The next change, or None after timeout_s."""
        while True:
            item = await self._reader.next(timeout_s)
            if item is None:
                return None
            entry = self._bucket.entry_of(item[0], item[1], self._value_type)
            if entry is not None:
                return entry

    def __aiter__(self) -> "Watch[T]":
        return self

    async def __anext__(self) -> Entry[T]:
        while True:
            entry = await self.next()
            if entry is not None:
                return entry
