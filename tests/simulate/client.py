"""The simulated client of NATS that takes the place of nats-py's: one connection of one simulated process."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from runtime.bus.nats.client import nats_errors
from tests.simulate.loop import CURRENT, Process
from tests.simulate.server import MAX_PAYLOAD, Headers, Link, Msg, SimulatedServer

CONNECT_TIMEOUT_S: Final = 2.0  # nats-py's default
Callback = Callable[[Msg], Awaitable[None]]


class Faults(Protocol):
    """What may happen at a call of the bus."""

    def before(self, process: Process, subject: str) -> None: ...
    def after(self, process: Process, subject: str, link: Link | None) -> None: ...


class Network(Protocol):
    """What clients of a simulation reach."""

    @property
    def server(self) -> SimulatedServer: ...
    @property
    def process(self) -> Process: ...
    @property
    def faults(self) -> Faults | None: ...


class _InUse:
    network: Network | None = None


@contextmanager
def use(network: Network) -> Generator[None]:
    """Have new clients reach this network, for the duration of a block."""
    _InUse.network = network
    try:
        yield
    finally:
        _InUse.network = None


class Subscription:
    """A subscription of a client."""

    def __init__(self, client: "SimulatedClient", sid: int, subject: str, callback: Callback) -> None:
        self.subject = subject
        self._client = client
        self._sid = sid
        self._callback = callback

    def deliver(self, message: Msg) -> None:
        """Call the callback, which must not wait."""
        coroutine: Any = self._callback(message)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError(f"the callback of {self.subject} waits")

    async def unsubscribe(self) -> None:
        self._client.forget(self._sid)

    async def drain(self) -> None:
        """End the subscription after what the server sent before."""
        self._client.end(self._sid)
        try:
            await self._client.flush(10)
        finally:
            self._client.forget(self._sid)


class SimulatedClient:
    """What the bus uses of nats-py's client."""

    requires_tls = False
    is_clustered = False
    max_payload = MAX_PAYLOAD

    def __init__(self) -> None:
        assert _InUse.network is not None
        self._network = _InUse.network
        self.process = CURRENT.get() or self._network.process
        self.process.on_death.append(self.lose)
        self._link: Link | None = None
        self._status = "new"
        self._subs: dict[int, Subscription] = {}
        self._sids = itertools.count(1)
        self._inboxes = ""
        self._pongs: list[asyncio.Future[None]] = []
        self._pending: list[tuple[Any, ...]] = []  # sent while there is no connection
        self._pending_bytes = 0
        self._options: dict[str, Any] = {}
        self._ping_timer: asyncio.TimerHandle | None = None
        self._pings = 0
        self._reconnecting: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._status == "connected"

    @property
    def is_closed(self) -> bool:
        return self._status == "closed"

    def new_inbox(self) -> str:
        return f"{self._inboxes}.{self._network.server.unique():022}"

    async def connect(self, servers: list[str], name: str, inbox_prefix: str, **options: Any) -> None:
        """Connect; tries until it succeeds."""
        self._inboxes, self._options = inbox_prefix, options
        await self._connect_for_ever()
        self._connected()

    async def _connect_for_ever(self) -> None:
        wait_s: float = self._options["reconnect_time_wait"]
        while True:
            try:
                await self._try()
            except (OSError, nats_errors.Error) as error:
                await self._options["error_cb"](error)
                await asyncio.sleep(wait_s)
            else:
                return

    async def _try(self) -> None:
        server = self._network.server
        await asyncio.sleep(server.latency_s())
        if not server.is_up:
            raise ConnectionRefusedError("connection refused")
        self._link = link = server.link(self)
        link.send(server.ping)
        try:
            await self._pong(CONNECT_TIMEOUT_S)
        except nats_errors.Error:
            link.close()
            self._link = None
            raise

    def _connected(self) -> None:
        self._status = "connected"
        self._pings = 0
        self._arm()

    async def _reconnect(self) -> None:
        await self._options["disconnected_cb"]()
        await self._connect_for_ever()
        link = self._link
        assert link is not None
        for sid, subscription in self._subs.items():
            link.send(self._network.server.subscribe, sid, subscription.subject)
        for what in self._pending:
            link.send(self._network.server.publish, *what)
        self._pending, self._pending_bytes = [], 0
        self._connected()
        await self._options["reconnected_cb"]()

    def cut(self, reason: str) -> None:
        """Notice that the connection ended."""
        if self._status != "connected":
            for pong in self._pongs:
                if not pong.done():
                    pong.set_exception(nats_errors.ConnectionClosedError())
            return
        self._status = "reconnecting"
        self._link = None
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        for pong in self._pongs:
            pong.cancel()
        self._pongs.clear()
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    # pings

    def _arm(self) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(self._options["ping_interval"], self._ping)

    def _ping(self) -> None:
        link = self._link
        if self._status != "connected" or link is None:
            return
        self._pings += 1
        if self._pings > self._options["max_outstanding_pings"]:
            link.close()
            self.cut("stale connection")
            return
        link.send(self._network.server.ping)
        self._arm()

    def ponged(self) -> None:
        """Take the answer to the oldest ping."""
        self._pings = 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_result(None)
                break

    async def _pong(self, timeout_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise nats_errors.FlushTimeoutError from None
        finally:
            if future in self._pongs:
                self._pongs.remove(future)

    async def flush(self, timeout: float = 10) -> None:
        """Wait until the server has handled what was sent."""
        if self._status == "closed":
            raise nats_errors.ConnectionClosedError
        if self._link is not None:
            self._link.send(self._network.server.ping)
        try:
            await self._pong(timeout)
        except asyncio.CancelledError:
            if self._status == "connected" or self._status == "closed":
                raise
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise nats_errors.FlushTimeoutError from None

    # messages

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "", headers: Headers = None) -> None:
        """Send a message, or keep it until there is a connection again."""
        if not subject or " " in subject or ".." in subject or subject.startswith(".") or subject.endswith("."):
            raise nats_errors.BadSubjectError
        if self._status == "closed":
            raise nats_errors.ConnectionClosedError
        faults = self._network.faults
        if faults is not None:
            faults.before(self.process, subject)
            if self.process.is_dead:
                await asyncio.get_running_loop().create_future()
        what = (subject, reply, dict(headers) if headers else None, payload)
        link = self._link
        if self._status == "connected" and link is not None:
            link.send(self._network.server.publish, *what)
        else:
            self._pending_bytes += len(payload)
            if self._pending_bytes > self._options["pending_size"]:
                self._pending_bytes -= len(payload)
                raise nats_errors.OutboundBufferLimitError
            self._pending.append(what)
        if faults is not None:
            faults.after(self.process, subject, link)
            if self.process.is_dead:
                await asyncio.get_running_loop().create_future()

    async def subscribe(
        self, subject: str, *, cb: Callback, pending_msgs_limit: int, pending_bytes_limit: int
    ) -> Subscription:
        """Call the callback with each message of a subject."""
        if self._status == "closed":
            raise nats_errors.ConnectionClosedError
        sid = next(self._sids)
        self._subs[sid] = subscription = Subscription(self, sid, subject, cb)
        if self._link is not None and self._status == "connected":
            self._link.send(self._network.server.subscribe, sid, subject)
        return subscription

    def received(self, sid: int, message: Msg) -> None:
        """Take a message from the server."""
        subscription = self._subs.get(sid)
        if subscription is not None:
            subscription.deliver(message)

    def end(self, sid: int) -> None:
        """Have the server send no more."""
        if self._link is not None and self._status == "connected":
            self._link.send(self._network.server.unsubscribe, sid)

    def forget(self, sid: int) -> None:
        """End a subscription."""
        if self._subs.pop(sid, None) is not None:
            self.end(sid)

    async def close(self) -> None:
        """End the connection for good."""
        if self._status == "closed":
            return
        self._status = "closed"
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._subs.clear()
        if self._options:
            await self._options["disconnected_cb"]()
            await self._options["closed_cb"]()

    def lose(self) -> None:
        """End with the process: the machine closes the socket. What was sent arrives."""
        self._status = "closed"
        if self._link is not None:
            self._link.close()
            self._link = None
