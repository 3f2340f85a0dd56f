"""Administration of a run's streams: create, inspect, purge. Not for single messages."""

import msgspec

from messages import Plane
from messages.subjects import stream_of
from runtime.bus.limits import StreamLimits
from runtime.bus.nats import streams
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.rights import missing_rights
from runtime.bus.nats.streams import StreamState

__all__ = ["Administration", "Holdings", "StreamState"]


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run's streams and bucket on a server."""

    whole: bool  # all of them exist
    has_bucket: bool
    used: bool  # whether any plane has ever stored a message


class Administration:
    """Operations of a bus on entire streams."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._run = run

    async def ensure_streams(self, limits: StreamLimits) -> None:
        """Create this run's streams and bucket, or update their limits.

        Raises:
            StreamConflict: a stream exists with other settings that cannot be changed.
            BusError: the server refuses.
        """
        await streams.ensure_streams(self._connection, self._run, limits)

    async def missing_rights(self) -> list[str]:
        """Rights that the login of this run lacks on the server. Changes nothing there."""
        return [str(right) for right in await missing_rights(self._connection, self._run)]

    async def holdings(self) -> Holdings:
        """State of this run's streams and bucket on the server. Creates nothing."""
        names = streams.stream_names(self._run)
        found = await streams.found_streams(self._connection, self._run)
        bucket, *planes = names
        return Holdings(
            whole=len(found) == len(names),
            has_bucket=bucket in found,
            used=any(found[name].last_seq > 0 for name in planes if name in found),
        )

    async def delete_streams(self) -> None:
        """Delete this run's streams, their consumers and its bucket, if they exist."""
        await streams.delete_streams(self._connection, self._run)

    async def purge(self, plane: Plane, *, below_seq: int) -> None:
        """Delete the messages of a plane below a sequence."""
        await streams.purge(self._connection, stream_of(self._run, plane), below_seq=below_seq)

    async def delete_message(self, plane: Plane, seq: int) -> None:
        """Delete one message of a plane, if it is still stored."""
        await streams.delete_message(self._connection, stream_of(self._run, plane), seq)

    async def state(self, plane: Plane) -> StreamState:
        """State of a plane's stream."""
        return await streams.state_of(self._connection, stream_of(self._run, plane))

    async def widen(self, plane: Plane, *, to_bytes: int) -> None:
        """Raise the byte limit of a plane's stream, unless it is that high. The next `ensure_streams` resets it."""
        await streams.widen(self._connection, stream_of(self._run, plane), to_bytes=to_bytes)
