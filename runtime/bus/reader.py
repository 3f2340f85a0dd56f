"""Reading a stream in its total order, from a sequence on, across restarts of the server."""

import asyncio
from collections.abc import Sequence

from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.consumers import forget_reader, make_reader
from runtime.bus.nats.pull import ConsumerLost, Place, Pull, place_of


class LogReader:
    """Messages of a stream after a sequence, in order, none skipped, none twice.

    The consumer behind it lives in the server's memory. Whenever it is lost, out of step or suspected, a new one starts
    after the last sequence seen.

    Args:
        from_seq: first sequence to read; None: the latest message of each subject, then all that follow.
    """

    def __init__(self, connection: Connection, stream: str, filters: Sequence[str], *, from_seq: int | None) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = list(filters)
        self._last_seq = (from_seq or 1) - 1
        self._consumer = ""
        self._consumer_seq = 0
        self._last_per_subject = from_seq is None
        limits = connection.limits
        self._pull = Pull(
            connection, stream, ahead=limits.read_ahead, max_bytes=limits.read_ahead_bytes, redelivers=False
        )
        self.num_pending = 0

    async def open(self) -> None:
        """Begin. Afterwards `num_pending` says how many messages wait to be read.

        Raises:
            BusUnavailable: no such stream, or no server, until the deadline.
        """
        latest = self._last_per_subject and self._last_seq <= 0
        from_seq = None if latest else self._last_seq + 1
        made = await make_reader(self._connection, self._stream, self._filters, from_seq)
        self._consumer = made.name
        self._consumer_seq = 0
        self.num_pending = made.num_pending
        await self._pull.open(made.name, made.epoch)

    async def close(self) -> None:
        """End. The consumer is removed, or forgotten by the server if that does not reach it."""
        await self._pull.close()
        if self._consumer and self._connection.is_connected:
            await forget_reader(self._connection, self._stream, self._consumer)

    async def next(self, timeout_s: float | None = None) -> tuple[RawMessage, Place] | None:
        """The next message and its place, or None after timeout_s."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            remaining_s = None if deadline is None else max(0.0, deadline - loop.time())
            try:
                message = await self._pull.next(remaining_s)
            except ConsumerLost:
                await self.open()
                continue
            if message is None:
                return None
            place = place_of(message.reply)
            if place.consumer != self._consumer or place.consumer_seq != self._consumer_seq + 1:
                await self.open()  # something was dropped on the way
                continue
            self._consumer_seq = place.consumer_seq
            self._last_seq = place.stream_seq
            self.num_pending = place.num_pending
            self._connection.counters.received += 1
            return message, place
