"""One connection to a NATS server.

It adds bounds and errors that nats-py lacks. A request fails at once when the connection is lost, instead of waiting
out its deadline. A message over the server's limit is never sent, because the server would close the connection for
good. Errors that nats-py only reports to a callback are counted. A closed connection cancels the scope that owns it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Protocol

import anyio
import msgspec
import structlog

from messages.subjects import INBOX
from runtime.bus.errors import BusError, BusRefused, BusUnavailable, MessageRefused, MessageTooLarge
from runtime.bus.limits import BusLimits
from runtime.bus.nats.client import CorrectedClient, Msg, Subscription, load_websockets, nats_errors
from runtime.bus.nats.login import is_refusal, login_options, requires_tls, tls_options
from runtime.bus.nats.outages import Outages
from runtime.util.retrying import Backoff
from runtime.util.secrets import split_login, without_logins

log = structlog.get_logger()

Headers = dict[str, str]
STATUS = "Status"  # header in which nats-py puts a status line
NO_RESPONDERS = "503"
BACKOFF = Backoff(first_s=0.02, max_s=0.5)
CLUSTER_ATTEMPT_S = 0.5  # of the first attempt at a cluster; each further one may take twice as long
MAX_SUBJECT_BYTES = 1024  # the server closes a connection over 4096 bytes of control line
_HEADER_FRAME_BYTES = len("NATS/1.0\r\n\r\n")
_HEADER_LINE_BYTES = len(": \r\n")


class RawMessage(Protocol):
    """A received message, as nats-py delivers it."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


class Disconnected(BusError):
    """The connection was lost during a request. Internal: callers retry or map it."""


class AttemptTimeout(BusError):
    """One attempt got no answer. Internal: callers retry or map it."""


class NoResponders(BusError):
    """No listener on the subject: no stream, no consumer, no actor. Internal: callers retry or map it."""


class Counters(msgspec.Struct):
    """Counters of one connection since it was opened."""

    published: int = 0
    publish_retries: int = 0
    fetched: int = 0
    received: int = 0
    reconnects: int = 0
    async_errors: int = 0  # reported to the client's error callback, including slow consumers
    slow_consumer_drops: int = 0
    dead_letters: int = 0
    answers_refused: int = 0  # to score requests, of another grader than the request's or unreadable
    acks_dropped: int = 0  # while disconnected with a full buffer; each causes a redelivery


def wire_size(payload: bytes, headers: Mapping[str, str]) -> int:
    """Bytes that the server counts against max_payload: header block and payload."""
    size = len(payload) + _HEADER_FRAME_BYTES
    for name, value in headers.items():
        size += len(name) + _HEADER_LINE_BYTES + (len(value) if value.isascii() else len(value.encode()))
    return size


# errors of a publish without a connection; uvloop raises RuntimeError for a socket that was just closed
_LOST = (nats_errors.OutboundBufferLimitError, nats_errors.ConnectionClosedError, RuntimeError)


class Connection:
    """A client with its reply inbox. Opened by `open_connection`."""

    def __init__(self, limits: BusLimits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.epoch = 0  # raised at each reconnect
        self._client = CorrectedClient()
        self._connected = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[RawMessage]] = {}
        self._tokens = count(1)
        self._reply_prefix = ""
        self._listeners: dict[Listener, None] = {}  # in their order
        self._reconnect_listeners: dict[Callable[[], None], None] = {}
        self._last_error = ""
        self.errors: list[str] | None = None  # if set, errors of the client's error callback are collected
        self._connecting: anyio.CancelScope | None = None  # during the first connect
        self._refused = ""  # why the server rejects the login
        self.ends_if_refused = False  # whether a login that is refused after an outage ends the connection
        self._errors_since_connect = 0
        self._closing = False
        self._on_lost: Callable[[], None] | None = None
        self.outages = Outages(limits.outage_s)

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def is_refused(self) -> bool:
        """Whether the server rejects the login."""
        return bool(self._refused)

    @property
    def last_error(self) -> str:
        """The latest error from the client's error callback, for the text of other errors."""
        return self._last_error

    @property
    def is_clustered(self) -> bool:
        """Whether the server is one of a cluster, where leaders change and reads from other servers may be late."""
        return self._client.is_clustered

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def unique(self) -> str:
        """A globally unique name."""
        return self._client.new_inbox().rpartition(".")[2]

    # opening and closing

    async def start(
        self, url: str, name: str, inboxes: str, on_lost: Callable[[], None], certificate: str | None = None
    ) -> None:
        """Connect, and subscribe to the reply inbox.

        Raises:
            BusUnavailable: no server answered in time.
            BusRefused: the server rejects the login.
        """
        self._on_lost = on_lost
        try:
            servers, login = split_login(url)
            options = login_options(login) | tls_options(certificate)
        except ValueError as error:
            raise BusUnavailable(str(error)) from error
        self._client.requires_tls = requires_tls(servers, certificate)
        with anyio.move_on_after(self.limits.connect_timeout_s) as self._connecting:
            await self._connect(servers, name, inboxes, options)
        self._connecting = None
        if self._refused or not self._client.is_connected:
            await self.close()
            reason = self._refused or f"not established within {self.limits.connect_timeout_s:g} s: {self._last_error}"
            kind = BusRefused if self._refused else BusUnavailable
            raise kind(f"no connection to {servers}: {reason}")
        self._connected.set()
        self._reply_prefix = self.new_inbox()
        await self.subscribe(f"{self._reply_prefix}.*", self._on_reply)

    async def _connect(self, servers: str, name: str, inboxes: str, options: dict[str, Any]) -> None:
        if servers.startswith(("ws:", "wss:")):
            load_websockets()
        await self._client.connect(
            servers=servers.split(","),
            name=name,
            inbox_prefix=inboxes,
            **options,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=self.limits.reconnect_wait_s,  # pyright: ignore[reportArgumentType] - annotated int, used as seconds
            ping_interval=self.limits.ping_interval_s,
            max_outstanding_pings=self.limits.max_pings,
            pending_size=self.limits.pending_bytes,
            flush_timeout=self.limits.attempt_timeout_s,
        )

    async def close(self) -> None:
        """Flush and close. Does not raise if the server is gone."""
        self._closing = True
        with anyio.move_on_after(self.limits.drain_timeout_s, shield=True):
            if self._client.is_connected:
                try:
                    with anyio.move_on_after(self.limits.drain_timeout_s / 2):
                        await self._client.flush()
                except (nats_errors.Error, OSError):
                    log.debug("bus_flush_failed", last_error=self._last_error)
            # nats-py's close leaves its tasks running, and raises if unsent data remains in an outage
            for listener in tuple(self._listeners):
                await listener.stop()
            try:
                await self._client.close()
            except (OSError, AttributeError) as error:  # asyncio's TLS transport raises the latter
                log.warning("bus_closed_with_unsent_data", error=repr(error))
            except asyncio.CancelledError:
                # nats-py cancels its own reconnect, which may wait for the same end of the transport as its close
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
        self._fail_waiting(Disconnected("closed"))

    # sending

    def check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Refuse a message for which the server would close the connection for good.

        Raises:
            MessageTooLarge: headers and payload exceed the max_payload of the server, or the subject is too long.
        """
        size = wire_size(payload, headers)
        if size > self._client.max_payload:
            raise MessageTooLarge(subject, size, self._client.max_payload)
        if len(subject) > MAX_SUBJECT_BYTES or (not subject.isascii() and len(subject.encode()) > MAX_SUBJECT_BYTES):
            raise MessageTooLarge(subject[:80] + "...", len(subject), MAX_SUBJECT_BYTES)

    async def send(self, subject: str, payload: bytes, headers: Headers | None = None, reply: str = "") -> None:
        """Core publish, without an answer. Buffered during an outage, up to a bound.

        Raises:
            MessageRefused: the message is too large or the subject invalid; nothing was sent.
            Disconnected: the buffer is full, or the connection is closed.
        """
        self.check_size(subject, payload, headers or {})
        try:
            await self._client.publish(subject, payload, reply=reply, headers=headers)
        except _LOST as error:
            raise Disconnected(repr(error)) from error
        except nats_errors.BadSubjectError as error:
            raise MessageRefused(f"{subject[:80]!r} is not a subject") from error

    async def flush(self) -> None:
        """Wait until the server has processed all that was sent.

        Raises:
            BusUnavailable: it does not answer.
        """
        try:
            for _ in range(2):  # nats-py writes its PING before what is pending, and then has that written
                await self._client.flush(self.limits.attempt_timeout_s)  # pyright: ignore[reportArgumentType]
        except (nats_errors.Error, OSError) as error:
            raise BusUnavailable(f"no answer to a flush: {error!r}") from error

    async def request(self, subject: str, payload: bytes, headers: Headers | None, timeout_s: float) -> RawMessage:
        """Make one attempt of a request and wait for its answer. The caller has checked the size.

        Raises:
            Disconnected: the connection is or goes down; raised at once, not after the timeout.
            AttemptTimeout: no answer.
            NoResponders: no listener on the subject.
            MessageRefused: the subject is invalid.
        """
        if not self._connected.is_set():
            raise Disconnected("not connected")
        loop = asyncio.get_running_loop()
        token = str(next(self._tokens))
        future: asyncio.Future[RawMessage] = loop.create_future()
        self._waiting[token] = future
        timer = loop.call_later(timeout_s, _expire, future)
        try:
            await self._client.publish(subject, payload, reply=f"{self._reply_prefix}.{token}", headers=headers)
            answer = await future
        except _LOST as error:
            raise Disconnected(repr(error)) from error
        except nats_errors.BadSubjectError as error:
            raise MessageRefused(f"{subject[:80]!r} is not a subject") from error
        finally:
            timer.cancel()
            self._waiting.pop(token, None)
        if answer.headers is not None and answer.headers.get(STATUS) == NO_RESPONDERS and not answer.data:
            raise NoResponders(subject)
        return answer

    async def retry(self, subject: str, payload: bytes, headers: Headers | None, timeout_s: float) -> RawMessage:
        """Repeat a request until it is answered. Only for idempotent requests.

        Raises:
            BusUnavailable: no answer within timeout_s.
        """
        deadline = self.time() + timeout_s
        failures = 0
        while True:
            try:
                return await self.request(subject, payload, headers, self.attempt_time(deadline, failures))
            except (Disconnected, AttemptTimeout, NoResponders) as error:
                if not await self.pause(deadline, failures, error):
                    raise BusUnavailable(f"{subject}: {error!r} after {timeout_s:g} s; {self._last_error}") from error
                failures += 1

    def time(self) -> float:
        """Seconds on a clock for deadlines. It stands still in an outage, for up to limits.outage_s of each."""
        return self.outages.time()

    def attempt_time(self, deadline: float, failures: int) -> float:
        """Seconds that the next attempt may take. The deadline is one of `time`.

        The first attempts at a cluster are short: a server may still forward them to a leader that has just died.
        """
        longest_s = self.limits.attempt_timeout_s
        if self.is_clustered:
            longest_s = min(longest_s, CLUSTER_ATTEMPT_S * 2**failures)
        return max(0.001, min(longest_s, deadline - self.time()))

    async def pause(self, deadline: float, failures: int, error: BusError) -> bool:
        """Wait until another attempt makes sense. False: the deadline comes first. The deadline is one of `time`."""
        remaining_s = deadline - self.time()
        if isinstance(error, Disconnected) and not self._connected.is_set():
            return await self.wait_connected(remaining_s + self.outages.left_s)
        if self.is_clustered:
            self.outages.doubt()
        back_off_s = 0.0 if isinstance(error, AttemptTimeout) else BACKOFF.pause_s(failures + 1)
        if back_off_s >= remaining_s:
            return False
        await asyncio.sleep(back_off_s)
        return True

    async def wait_connected(self, within_s: float) -> bool:
        """Wait for the connection. False: there is none within so many seconds."""
        with anyio.move_on_after(max(0.0, within_s)):
            await self._connected.wait()
        return self._connected.is_set() and within_s > 0

    # receiving

    async def subscribe(self, subject: str, handler: Callable[[RawMessage], None]) -> "Listener":
        """Call the handler for each message, in order. Messages over the bound are dropped and counted."""

        async def deliver(message: Msg) -> None:
            handler(message)

        subscription = await self._client.subscribe(  # pyright: ignore[reportUnknownMemberType]
            subject,
            cb=deliver,
            pending_msgs_limit=self.limits.inbox_messages,
            pending_bytes_limit=self.limits.inbox_bytes,
        )
        listener = Listener(subscription, self._listeners)
        self._listeners[listener] = None
        return listener

    def on_reconnect(self, listener: Callable[[], None]) -> None:
        self._reconnect_listeners[listener] = None

    def forget_reconnect(self, listener: Callable[[], None]) -> None:
        self._reconnect_listeners.pop(listener, None)

    # callbacks of the client

    def _on_reply(self, message: RawMessage) -> None:
        future = self._waiting.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    def _fail_waiting(self, error: BusError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    async def _on_error(self, error: Exception) -> None:
        self.counters.async_errors += 1
        self._last_error = str(error) or repr(error)
        if self.errors is not None:
            self.errors.append(self._last_error)
        if isinstance(error, nats_errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1
        if self._connecting is not None and is_refusal(self._last_error):
            self._refused = self._last_error
            # delayed: the client is about to close its socket, and a cancellation now would prevent that
            asyncio.get_running_loop().call_later(self.limits.reconnect_wait_s / 2, self._connecting.cancel)
        elif self.ends_if_refused and self._on_lost is not None and is_refusal(self._last_error):
            self._refused = self._last_error
            self._on_lost()
        self._errors_since_connect += 1
        if self._errors_since_connect.bit_count() == 1:  # 1, 2, 4, 8, ...: an outage does not flood the log
            log.warning("bus_error", error=self._last_error, count=self._errors_since_connect)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self.outages.begin()
        if not self._closing:
            log.warning("bus_disconnected", last_error=self._last_error)
        self._fail_waiting(Disconnected("connection lost"))

    async def _on_reconnected(self) -> None:
        self.epoch += 1
        self.counters.reconnects += 1
        log.info("bus_reconnected", failed_attempts=self._errors_since_connect)
        self._errors_since_connect = 0
        if self.is_clustered and self.limits.outage_s:
            self.outages.doubt()  # this server may be one of a minority, which stores nothing
        else:
            self.outages.end()
        self._connected.set()
        for listener in tuple(self._reconnect_listeners):
            listener()

    async def _on_closed(self) -> None:
        self._connected.clear()
        self._fail_waiting(Disconnected("connection closed"))
        if not self._closing and self._on_lost is not None:
            log.error("bus_closed", last_error=self._last_error)
            self._on_lost()


class Listener:
    """A subscription that can be stopped."""

    def __init__(self, subscription: Subscription, registry: "dict[Listener, None]") -> None:
        self._subscription = subscription
        self._registry = registry

    async def stop(self) -> None:
        """Unsubscribe. Messages in transit are dropped."""
        self._registry.pop(self, None)
        await _quietly(self._subscription.unsubscribe())

    async def drain(self) -> None:
        """Unsubscribe after all messages sent by the server are handled. The caller bounds the wait."""
        self._registry.pop(self, None)
        await _quietly(self._subscription.drain())


async def _quietly(ending: Awaitable[Any]) -> None:
    try:
        await ending
    except (nats_errors.Error, OSError):  # closed, reconnecting or timed out: the server drops the subscription anyway
        log.debug("bus_subscription_gone")


def _expire(future: asyncio.Future[RawMessage]) -> None:
    if not future.done():
        future.set_exception(AttemptTimeout("no answer"))


@asynccontextmanager
async def open_connection(
    url: str,
    *,
    name: str,
    limits: BusLimits,
    inboxes: str = INBOX,
    certificate: str | None = None,
    ends_if_refused: bool = False,
) -> AsyncGenerator[Connection, None]:
    """Open a connection for the duration of a block. If it closes for good, the block is cancelled.

    Args:
        url: nats://[user:password@]host:port; several are separated by commas.
        name: shown in the server's monitoring.
        limits: deadlines and buffer bounds.
        inboxes: subject prefix of its inboxes.
        certificate: PEM certificate of a run's own server, which alone is trusted; none: no TLS, or that of the URL.
        ends_if_refused: whether the connection ends when the server refuses a login that it accepted before. If not,
            it is tried again and again.

    Raises:
        BusUnavailable: no server at first, or the connection closed for good during the block.
        BusRefused: the server rejects the login.
    """
    connection = Connection(limits)
    connection.ends_if_refused = ends_if_refused
    lost = False
    with anyio.CancelScope() as scope:

        def on_lost() -> None:
            nonlocal lost
            lost = True
            scope.cancel()

        await connection.start(url, name, inboxes, on_lost, certificate)
        try:
            yield connection
        finally:
            await connection.close()
    if lost:
        kind = BusRefused if connection.is_refused else BusUnavailable
        raise kind(f"{without_logins(url)}: connection closed for good: {connection.last_error}")
