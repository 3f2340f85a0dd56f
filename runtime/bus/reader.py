"""Ordered reading of a stream from a sequence on, across restarts of the server."""

import asyncio
from collections.abc import Sequence

from runtime.bus.errors import LogTrimmedAway
from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.consumers import forget_reader, make_reader
from runtime.bus.nats.pull import ConsumerLost, Place, Pull, place_of
from runtime.bus.nats.streams import state_of


class LogReader:
    """Messages of a stream after a sequence, in order, without gaps and duplicates.

    Its consumer lives in the server's memory. If the consumer is lost or out of step, a new one starts after the last
    sequence seen.

    Args:
        from_seq: first sequence to read; None: the latest message of each subject, then all later ones.
        skips: whether messages may be skipped that are deleted from the stream before they are read.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        filters: Sequence[str],
        *,
        from_seq: int | None,
        skips: bool = True,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = list(filters)
        self._last_seq = (from_seq or 1) - 1
        self._consumer = ""
        self._consumer_seq = 0
        self._last_per_subject = from_seq is None
        self._skips = skips
        self._was_open = False
        limits = connection.limits
        self._pull = Pull(
            connection, stream, ahead=lambda: limits.read_ahead, max_bytes=limits.read_ahead_bytes, redelivers=False
        )
        self.num_pending = 0

    async def open(self) -> None:
        """Create the consumer and start to pull. Sets `num_pending` to the number of messages to read.

        Raises:
            BusUnavailable: no such stream, or no server, until the deadline.
            LogTrimmedAway: unread messages are gone.
        """
        latest = self._last_per_subject and self._last_seq <= 0
        from_seq = None if latest else self._last_seq + 1
        made = await make_reader(self._connection, self._stream, self._filters, from_seq)
        self._consumer = made.name
        self._consumer_seq = 0
        self.num_pending = made.num_pending
        if not self._skips:
            await self._check_not_trimmed()
        self._was_open = True
        await self._pull.open(made.name, made.epoch)

    async def _check_not_trimmed(self) -> None:
        """Raise LogTrimmedAway if unread messages may be gone.

        Deleted messages are not lost if this reader has read them. The server's heartbeats also tell up to which
        sequence no further message passes the filters. Messages that are missing at the first open are not lost either:
        the caller has their content from elsewhere.
        """
        first_seq = (await state_of(self._connection, self._stream)).first_seq
        if first_seq <= max(self._last_seq, self._pull.idle_seq) + 1:
            return
        if not self._was_open:
            self._last_seq = first_seq - 1
            return
        raise LogTrimmedAway(
            f"{self._stream} begins at {first_seq}: messages from {self._last_seq + 1} on were deleted before they "
            f"were read"
        )

    async def close(self) -> None:
        """Close. Removes the consumer, which the server otherwise removes as inactive."""
        await self._pull.close()
        if self._consumer and self._connection.is_connected:
            await forget_reader(self._connection, self._stream, self._consumer)

    async def next(self, timeout_s: float | None = None) -> tuple[RawMessage, Place] | None:
        """The next message and its place, or None after timeout_s.

        None also if pending messages were deleted, so that a reader until `num_pending` is 0 ends.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            remaining_s = None if deadline is None else max(0.0, deadline - loop.time())
            try:
                message = await self._pull.next(remaining_s)
            except ConsumerLost:
                if await self._reopened_on_nothing():
                    return None
                continue
            if message is None:
                return None
            place = place_of(message.reply)
            if place.consumer != self._consumer or place.consumer_seq != self._consumer_seq + 1:
                if await self._reopened_on_nothing():  # a message was dropped on the way
                    return None
                continue
            self._consumer_seq = place.consumer_seq
            self._last_seq = place.stream_seq
            self.num_pending = place.num_pending
            self._connection.counters.received += 1
            return message, place

    async def _reopened_on_nothing(self) -> bool:
        """Reopen. Returns whether the messages pending before are gone."""
        pending = self.num_pending
        await self.open()
        return pending > 0 and not self.num_pending
