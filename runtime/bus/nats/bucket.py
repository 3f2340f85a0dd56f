"""A KV bucket as JetStream knows it: a stream with a subject for each key, read by its last message."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from runtime.bus.nats.store import Store

_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"  # the server's own removals
_TTL: Final = "Nats-TTL"


class Kept(NamedTuple):
    """The latest that a bucket holds of a key."""

    value: bytes | None  # None: it was removed
    revision: int


def is_removal(headers: Mapping[str, str] | None) -> bool:
    """Whether a stored change takes the key away."""
    return headers is not None and (_OPERATION in headers or _MARKER in headers)


class Bucket:
    """One bucket over one connection."""

    def __init__(self, store: Store, name: str) -> None:
        self.stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._store = store

    def subject(self, key: str) -> str:
        """Where a key, or every key of a filter, lies in the stream."""
        return self._prefix + key

    def key(self, subject: str) -> str:
        """The key that lies under a subject."""
        return subject.removeprefix(self._prefix)

    async def last(self, key: str) -> Kept | None:
        """The latest of a key; None if it never had a value.

        Raises:
            BusUnavailable: no server.
        """
        stored = await self._store.last(self.stream, self.subject(key))
        return None if stored is None else Kept(None if is_removal(stored.headers) else stored.data, stored.seq)

    async def put(self, key: str, value: bytes, *, revision: int | None = None, ttl_s: int | None = None) -> int:
        """Set a value and return its revision.

        Args:
            revision: what the key must still be at; 0: it never had a value.
            ttl_s: the value vanishes after this long.

        Raises:
            SequenceMismatch: the key is at another revision.
        """
        headers = {} if ttl_s is None else {_TTL: f"{ttl_s}s"}
        return await self._store.put(self.subject(key), value, headers, expected_last=revision)

    async def remove(self, key: str, *, revision: int | None = None) -> None:
        """Take a value away, if the key is still at this revision.

        Raises:
            SequenceMismatch: it is not.
        """
        await self._store.put(self.subject(key), b"", {_OPERATION: "DEL"}, expected_last=revision)
