"""Reading a stream in its total order, from a sequence on, across restarts of the server."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import anyio

from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.connection import Connection, Disconnected, RawMessage
from runtime.bus.nats.pull import ConsumerLost, Place, Pull, place_of
from runtime.bus.nats.store import API, ApiFailed, api_call

INACTIVE_S: Final = 60  # the server forgets a reader that asked for nothing this long; it is made again when it does
NANOSECONDS: Final = 1_000_000_000
STREAM_NOT_FOUND: Final = 10059


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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connection.limits.publish_timeout_s
        failures = 0
        while True:
            epoch = self._connection.epoch
            try:
                info = await api_call(self._connection, f"CONSUMER.CREATE.{self._stream}", self._config())
            except ApiFailed as error:
                if error.err_code != STREAM_NOT_FOUND or not await self._connection.pause(deadline, failures, error):
                    raise BusUnavailable(f"cannot read {self._stream}: {error}") from error
                failures += 1
                continue
            break
        self._consumer = info["name"]
        self._consumer_seq = 0
        self.num_pending = info["num_pending"]
        await self._pull.open(self._consumer, epoch)

    def _config(self) -> dict[str, Any]:
        start: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last_seq + 1}
        if self._last_per_subject and self._last_seq <= 0:
            start = {"deliver_policy": "last_per_subject"}
        config = start | {
            "filter_subjects": self._filters,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": INACTIVE_S * NANOSECONDS,
        }
        return {"stream_name": self._stream, "config": config}

    async def close(self) -> None:
        """End. The consumer is removed, or forgotten by the server if that does not reach it."""
        await self._pull.close()
        if not self._consumer or not self._connection.is_connected:
            return
        subject = f"{API}.CONSUMER.DELETE.{self._stream}.{self._consumer}"
        with anyio.move_on_after(self._connection.limits.drain_timeout_s, shield=True):
            try:
                await self._connection.send(subject, b"", reply=self._connection.new_inbox())
            except Disconnected:
                return

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
