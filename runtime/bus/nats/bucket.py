"""A JetStream KV bucket: a stream with one subject per key, read by its last message."""

from collections.abc import Mapping
from datetime import datetime
from typing import Final, NamedTuple

from runtime.bus.nats.store import TIME, Store

_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"  # on removals by the server
_TTL: Final = "Nats-TTL"


class Kept(NamedTuple):
    """The latest state of a key in a bucket."""

    value: bytes | None  # None: removed
    revision: int


def is_removal(headers: Mapping[str, str] | None) -> bool:
    """Whether a stored change removes the key."""
    return headers is not None and (_OPERATION in headers or _MARKER in headers)


class Bucket:
    """A run's KV bucket, used over one connection."""

    def __init__(self, store: Store, name: str) -> None:
        self.stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._store = store

    def subject(self, key: str) -> str:
        """Subject of a key or key filter in the stream."""
        return self._prefix + key

    def key(self, subject: str) -> str:
        """Key of a subject."""
        return subject.removeprefix(self._prefix)

    async def last(self, key: str) -> Kept | None:
        """The latest state of a key; None if it never had a value.

        Raises:
            BusUnavailable: no server.
        """
        stored = await self._store.last(self.stream, self.subject(key))
        return None if stored is None else Kept(None if is_removal(stored.headers) else stored.data, stored.seq)

    async def stored_at(self, key: str) -> float | None:
        """When the server stored the latest state of a key, as Unix time on its clock; None if it never had a value.

        Raises:
            BusUnavailable: no server.
        """
        stored = await self._store.last(self.stream, self.subject(key))
        return None if stored is None else datetime.fromisoformat(stored.headers[TIME]).timestamp()

    async def last_of_each(self, key_filter: str) -> list[tuple[str, Kept]]:
        """The latest state of each key under a filter, removed ones included, by revision. One round trip.

        Raises:
            BusUnavailable: no server.
        """
        found = await self._store.last_of_each(self.stream, self.subject(key_filter))
        return [
            (self.key(stored.subject), Kept(None if is_removal(stored.headers) else stored.data, stored.seq))
            for stored in found
        ]

    async def put(self, key: str, value: bytes, *, revision: int | None = None, ttl_s: int | None = None) -> int:
        """Set a value and return its revision.

        Args:
            key: key to set.
            value: new value.
            revision: required current revision of the key; 0: it never had a value; None: any.
            ttl_s: lifetime of the value.

        Raises:
            SequenceMismatch: the key is at another revision.
        """
        headers = {} if ttl_s is None else {_TTL: f"{ttl_s}s"}
        return await self._store.put(self.subject(key), value, headers, expected_last=revision)

    async def remove(self, key: str, *, revision: int | None = None) -> None:
        """Remove a value, if the key is still at this revision.

        Raises:
            SequenceMismatch: the key is at another revision.
        """
        await self._store.put(self.subject(key), b"", {_OPERATION: "DEL"}, expected_last=revision)
