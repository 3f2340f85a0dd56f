"""Pull requests of one consumer, and the messages that they return. Bounded: only requested messages arrive."""

import asyncio
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import anyio
import msgspec

from runtime.bus.errors import BusError
from runtime.bus.nats.connection import NO_RESPONDERS, STATUS, Connection, Disconnected, Listener, RawMessage
from runtime.bus.nats.store import API, NANOSECONDS

DELIVERY: Final = "$JS.ACK."
HEARTBEAT: Final = "100"
PENDING_MESSAGES: Final = "Nats-Pending-Messages"  # undelivered messages of a pull request at its end
LAST_DELIVERED: Final = "Nats-Last-Consumer"  # in a heartbeat: number of messages that the consumer sent
LAST_CONSIDERED: Final = "Nats-Last-Stream"  # in a heartbeat: stream sequence up to which the consumer looked
TOO_LARGE: Final = "exceeds maxbytes"  # the next message exceeds the byte limit of the request
LOST_REASONS: Final = ("consumer deleted", "server shutdown", "leadership change", "consumer is push based")
GRACE_S: Final = 1.0  # added to a request's own expiry
MIN_EXPIRES_S: Final = 0.05
MICROSECOND: Final = timedelta(microseconds=1)
UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
STILL_S: Final = 1.0  # maximum gap between requests; nothing unsent is trimmed in a shorter one


class ConsumerLost(BusError):
    """The consumer is gone or silent. Internal: a reader creates a new one, a durable consumer is looked up again."""


class Place(NamedTuple):
    """Position of a delivery, from its reply subject."""

    consumer: str
    num_delivered: int
    stream_seq: int
    consumer_seq: int
    time_ns: int
    num_pending: int


def place_of(reply: str) -> Place:
    """Parse `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`."""
    tokens = reply.split(".")
    if len(tokens) != 9:  # a longer form has a domain and an account before the stream, and a token after pending
        tokens = tokens[2:]
    return Place(tokens[3], int(tokens[4]), int(tokens[5]), int(tokens[6]), int(tokens[7]), int(tokens[8]))


def time_of(time_ns: int) -> datetime:
    """Time at which the server stored a message, in whole microseconds."""
    return UNIX_EPOCH + time_ns // 1000 * MICROSECOND


class Pull:
    """An inbox that pull requests fill.

    Args:
        connection: connection to the server.
        stream: name of the stream.
        ahead: returns the number of messages to request ahead of demand; 0: only on demand.
        max_bytes: byte limit of one request; 0: only the number of messages is limited.
        max_batch: messages of one request; 0: any number.
        redelivers: whether messages lost with a connection are redelivered. If not, the consumer is lost with it.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        *,
        ahead: Callable[[], int],
        max_bytes: int = 0,
        max_batch: int = 0,
        redelivers: bool = True,
    ) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._stream = stream
        self._ahead = ahead
        self._max_bytes = max_bytes and max(max_bytes, 2 * connection.max_payload)
        self._max_batch = max_batch
        self._redelivers = redelivers
        self._consumer = ""
        self._inbox = ""
        self._listener: Listener | None = None
        self._buffer: deque[RawMessage] = deque()
        self._sleepers: deque[asyncio.Future[None]] = deque()
        self._num_waiting = 0
        self._outstanding = 0  # requested messages, neither delivered nor expired
        self._arrived = False  # whether a message arrived since the last request
        self._request_end = 0.0  # loop time after which an unanswered request is lost
        self._epoch = connection.epoch
        self._lost = ""
        self._served_until = 0.0  # loop time until which the server sends messages as soon as it stores them
        self._num_delivered = 0  # messages that arrived from the current consumer
        self.idle_seq = 0  # stream sequence up to which all messages were taken or did not match, by a heartbeat

    async def open(self, consumer: str, epoch: int) -> None:
        """Start or restart to pull from a consumer that existed in this epoch of the connection."""
        self._consumer = consumer
        self._outstanding = 0
        self._served_until = asyncio.get_running_loop().time()
        self._lost = ""
        self._epoch = epoch
        if self._listener is not None and self._redelivers:
            return
        if self._listener is not None:  # messages of the old consumer must not pass for the new one's
            await self._listener.stop()
        self._buffer.clear()
        self._num_delivered = 0
        self._inbox = self._connection.new_inbox()
        self._listener = await self._connection.subscribe(self._inbox, self._on_message)
        self._connection.on_reconnect(self._wake_all)

    async def close(self) -> list[RawMessage]:
        """Stop; return messages that arrived and were not taken.

        Bounded by limits.drain_timeout_s, even if cancelled.
        """
        self._connection.forget_reconnect(self._wake_all)
        if self._listener is not None:
            with anyio.move_on_after(self._limits.drain_timeout_s, shield=True):
                if self._redelivers and self._connection.is_connected:
                    await self._listener.drain()
                else:
                    await self._listener.stop()
        left = list(self._buffer)
        self._buffer.clear()
        self._lost = "closed"
        self._wake_all()
        return left

    @property
    def buffered(self) -> deque[RawMessage]:
        """Messages that arrived and were not taken."""
        return self._buffer

    async def next(self, timeout_s: float | None) -> RawMessage | None:
        """The next message, or None after timeout_s.

        Raises:
            ConsumerLost: the caller must call open() again.
        """
        if self._buffer:
            message = self._buffer.popleft()
            ahead = self._ahead()
            if ahead and len(self._buffer) <= ahead // 2:
                await self._top_up(None)
            return message
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._num_waiting += 1
        try:
            while not self._buffer:
                await self._top_up(deadline)
                if self._lost:
                    raise ConsumerLost(self._lost)
                if not self._buffer and not await self._sleep(deadline):
                    return None
            return self._buffer.popleft()
        finally:
            self._num_waiting -= 1

    async def _top_up(self, deadline: float | None) -> None:
        unserved_s = asyncio.get_running_loop().time() - self._served_until
        if not self._redelivers and self._connection.is_connected and unserved_s > STILL_S:
            self._lost = "no pull request open"  # the server silently skips messages trimmed meanwhile
        if self._epoch != self._connection.epoch:
            if not self._redelivers:
                self._lost = "reconnected"
                return
            self._epoch = self._connection.epoch
            self._outstanding = 0
        if self._lost:
            return
        ahead = self._ahead()
        wanted = max(ahead, self._num_waiting) - len(self._buffer)
        needed = self._num_waiting - len(self._buffer)  # by tasks that already wait
        enough = self._outstanding >= needed and self._outstanding > wanted // 2  # avoids one request per message
        if wanted <= 0 or enough or not self._connection.is_connected:
            return
        expires_s = self._limits.pull_expires_s
        if deadline is not None and not ahead:
            expires_s = max(MIN_EXPIRES_S, min(expires_s, deadline - asyncio.get_running_loop().time()))
        batch = wanted - self._outstanding
        if self._max_batch:
            batch = min(batch, self._max_batch)
        self._outstanding += batch
        await self._ask(batch, expires_s)

    async def _ask(self, batch: int, expires_s: float) -> None:
        request: dict[str, int] = {"batch": batch, "expires": int(expires_s * NANOSECONDS)}
        quiet_s = expires_s
        if expires_s > 2 * self._limits.pull_heartbeat_s:
            quiet_s = 2 * self._limits.pull_heartbeat_s
            request["idle_heartbeat"] = int(self._limits.pull_heartbeat_s * NANOSECONDS)
        if self._max_bytes:
            request["max_bytes"] = self._max_bytes
        self._heard(quiet_s)
        self._arrived = False
        self._served_until = asyncio.get_running_loop().time() + expires_s
        subject = f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        try:
            await self._connection.send(subject, msgspec.json.encode(request), reply=self._inbox)
        except Disconnected:
            self._outstanding -= batch  # requested again after the reconnect

    def _heard(self, quiet_s: float) -> None:
        self._request_end = asyncio.get_running_loop().time() + quiet_s + GRACE_S

    async def _sleep(self, deadline: float | None) -> bool:
        """Wait for a change. False: the deadline passed.

        Raises:
            ConsumerLost: the server sent not even heartbeats.
        """
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        self._sleepers.append(sleeper)
        connected = self._connection.is_connected
        until = self._request_end if connected else loop.time() + self._limits.attempt_timeout_s
        timer = loop.call_at(until if deadline is None else min(until, deadline), _wake, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
        now = loop.time()
        if deadline is not None and now >= deadline and not self._buffer:
            return False
        if connected and now >= self._request_end and not self._buffer:
            self._outstanding = 0
            raise ConsumerLost("no heartbeat")
        return True

    def _on_message(self, message: RawMessage) -> None:
        status = message.headers.get(STATUS) if message.headers is not None and not message.data else None
        if message.reply.startswith(DELIVERY):
            self._outstanding = max(0, self._outstanding - 1)  # requests from before a reconnect may be answered too
            self._arrived = True
            self._num_delivered += 1
            self._heard(2 * self._limits.pull_heartbeat_s)  # the server sends heartbeats only where no message goes
            self._note_end()
            self._buffer.append(message)
            self._wake_one()
        elif status is None:
            self._connection.counters.async_errors += 1  # only the server should send to this subject
        elif status == HEARTBEAT:
            self._heard(2 * self._limits.pull_heartbeat_s)
            self._note_idle(message.headers or {})
        else:
            self._on_status(status, message.headers or {})

    def _note_idle(self, headers: dict[str, str]) -> None:
        """Note how far the consumer has read the stream, if every message that it sent arrived and was taken."""
        if not self._buffer and headers.get(LAST_DELIVERED) == str(self._num_delivered):
            self.idle_seq = max(self.idle_seq, int(headers.get(LAST_CONSIDERED, 0)))

    def _on_status(self, status: str, headers: dict[str, str]) -> None:
        description = headers.get("Description", "").lower()
        if TOO_LARGE in description and not self._arrived:  # the message was stored under a larger limit
            self._max_bytes *= 2
        if status == NO_RESPONDERS or any(reason in description for reason in LOST_REASONS):
            self._lost = description or "no such consumer"
        undelivered = headers.get(PENDING_MESSAGES)
        self._outstanding = max(0, self._outstanding - int(undelivered)) if undelivered else 0
        self._note_end()
        self._wake_all()

    def _note_end(self) -> None:
        if not self._outstanding:
            self._served_until = min(self._served_until, asyncio.get_running_loop().time())

    def _wake_one(self) -> None:
        while self._sleepers:
            sleeper = self._sleepers.popleft()
            if not sleeper.done():
                sleeper.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._sleepers:
            _wake(self._sleepers.popleft())


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
