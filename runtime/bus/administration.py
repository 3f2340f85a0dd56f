"""A run's streams as a whole: made, looked at, emptied. Nothing here is about single messages."""

import msgspec

from messages import Plane
from messages.subjects import stream_of
from runtime.bus.limits import StreamLimits
from runtime.bus.nats import streams
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.streams import StreamState

__all__ = ["Administration", "Holdings", "StreamState"]


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has of a run's streams and bucket."""

    whole: bool  # all of them are there
    has_bucket: bool
    used: bool  # something was ever stored on a plane


class Administration:
    """The part of a bus that is about whole streams."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._run = run

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Make this run's streams and bucket, or bring their limits up to date.

        Raises:
            StreamConflict: one exists and differs in what cannot be changed.
            BusError: the server refuses.
        """
        await streams.ensure_streams(self._connection, self._run, limits)

    async def holdings(self) -> Holdings:
        """What the server has of this run; nothing is made."""
        names = streams.stream_names(self._run)
        found = await streams.found_streams(self._connection, self._run)
        bucket, *planes = names
        return Holdings(
            whole=len(found) == len(names),
            has_bucket=bucket in found,
            used=any(found[name].last_seq > 0 for name in planes if name in found),
        )

    async def delete_streams(self) -> None:
        """Delete this run's streams, their consumers and its bucket, as far as they are there."""
        await streams.delete_streams(self._connection, self._run)

    async def purge(self, plane: Plane, *, below_seq: int) -> None:
        """Delete the messages of a plane with lower sequences."""
        await streams.purge(self._connection, stream_of(self._run, plane), below_seq=below_seq)

    async def state(self, plane: Plane) -> StreamState:
        """What a plane holds."""
        return await streams.state_of(self._connection, stream_of(self._run, plane))

    async def widen(self, plane: Plane, *, to_bytes: int) -> None:
        """Raise the limit of a plane's stream, unless it is as high already, until `ensure_streams` sets it again."""
        await streams.widen(self._connection, stream_of(self._run, plane), to_bytes=to_bytes)
