"""Serves HTTP where any process may connect: what others leave open keeps no place from the holders of the secret.

The limits of heads, times, bodies and connections of every HTTP server of a run are here. A connection is handed to
aiohttp once the whole head of its request has come. Until then it is a socket alone. With TLS the head is encrypted:
such a connection is handed over at once, and has the same time for its handshake and its head. When a kind of
connection has no place left, its oldest one is closed. A new one is never refused.
"""

import asyncio
import errno
import logging
import resource
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

import anyio
import anyio.abc
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from runtime.bus.addresses import host_port

HEAD_S: Final = 5.0  # for the whole head of a request
ANSWER_S: Final = 30.0  # for the answer to a client without the secret: a file through a slow tunnel takes seconds
IDLE_S: Final = 60.0  # between two requests of a client with the secret
LOOK_EVERY_S: Final = 0.5  # for connections whose time is over
HEAD_BYTES: Final = 32_768
MAX_BODY_BYTES: Final = (
    65_536  # of a request to a server that reads none; the listener for agents has a limit of its own
)
HEAD_END: Final = b"\r\n\r\n"
BACKLOG: Final = 4096  # connections that the kernel holds; it drops what is beyond, which costs a client a second
ACCEPTED_AT_ONCE: Final = 64  # at most, before the event loop turns to requests
SHUTDOWN_S: Final = 0.5  # for requests that are answered at the end
AGAIN_S: Final = 0.05  # without a free descriptor
SEND_S: Final = 30.0  # for a client with the secret to take a part of its answer
SCHEME: Final = "Bearer "
# Connections of each kind, and the share of the descriptors that they may use. Together it is half of them.
WAITING: Final = (256, 4)  # the head of the request is not complete
ASKING: Final = (128, 8)  # a request without the secret is answered
TRUSTED: Final = (64, 8)  # a request had the secret

log = logging.getLogger(__name__)

Server = Callable[[], asyncio.Protocol]  # makes the protocol of a connection


class Limits(NamedTuple):
    """Connections of each kind: most of them, and the share of the descriptors that they may use.

    Args:
        waiting: the head of the request is not complete.
        asking: a request without the secret is answered.
        trusted: a request had the secret.
        of_holder: trusted ones of one holder of a secret, where there are several; None: as many as of all.
    """

    waiting: tuple[int, int] = WAITING
    asking: tuple[int, int] = ASKING
    trusted: tuple[int, int] = TRUSTED
    of_holder: int | None = None


USUAL: Final = Limits()


class Connection:
    """One accepted connection."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.socket = connection
        self.since = loop.time()
        self.head_bytes = 0  # that have come
        self._transport: asyncio.Transport | None = None
        self._is_handed_over = self._is_closed = False
        self._loop = loop

    @property
    def is_open(self) -> bool:
        """Whether it holds a descriptor. A transport that is closing holds it until its buffer is sent."""
        return self.socket.fileno() >= 0

    def look_after(self, head_bytes: int) -> None:
        """Have it looked at once it has more bytes of a head than these."""
        self.head_bytes = head_bytes
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, head_bytes + 1)

    def stop_looking(self) -> None:
        """The head is complete: leave its socket as it was."""
        self._loop.remove_reader(self.socket)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def hand_over(self, server: Server, tls: ssl.SSLContext | None = None) -> None:
        """Have a server answer the request, whose head has come unless there is TLS."""
        self.since, self._is_handed_over = self._loop.time(), True
        limit_s = None if tls is None else HEAD_S
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                server, self.socket, ssl=tls, ssl_handshake_timeout=limit_s
            )
        except (OSError, ValueError):  # the client is gone, speaks no TLS, or was closed meanwhile
            self.socket.close()
        else:
            self._transport = transport
            if self._is_closed:  # meanwhile
                self._transport.abort()

    def close(self) -> None:
        """Close it at once; what is not sent is lost."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
        elif self.is_open and not self._is_handed_over:
            self._loop.remove_reader(self.socket)
            self.socket.close()
        elif self.is_open:  # in its handshake, which ends with this
            with suppress(OSError):  # the client has left
                self.socket.shutdown(socket.SHUT_RDWR)


class Places:
    """Connections of one kind, the oldest first.

    Args:
        bound: most connections, and the number by which that of all descriptors is divided for another bound.
        limit_s: seconds after which one is closed.
    """

    def __init__(self, bound: tuple[int, int], limit_s: float | None) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most, share = bound
        self.bound = most if descriptors == resource.RLIM_INFINITY else max(4, min(most, descriptors // share))
        self._limit_s = limit_s
        self._known: dict[int, Connection] = {}  # by descriptor

    def add(self, connection: Connection) -> None:
        """Add a connection; close the oldest ones if there is no place for it."""
        if len(self._known) >= self.bound:
            self.drop_closed()
        while len(self._known) >= self.bound:
            self.close_oldest()
        number = connection.socket.fileno()
        self._known.pop(number, None)  # a closed one had this descriptor
        self._known[number] = connection

    def drop_closed(self) -> None:
        """Keep open connections alone: a closed one has the buffers of its transport."""
        self._known = {number: one for number, one in self._known.items() if one.is_open}

    def pop(self, number: int) -> Connection | None:
        """Take out the connection with a descriptor; None: it is not among these."""
        return self._known.pop(number, None)

    def close_oldest(self) -> bool:
        """Close the oldest connection; return False if there is none."""
        if not self._known:
            return False
        self._known.pop(next(iter(self._known))).close()
        return True

    def close_late(self, now: float) -> None:
        """Close the connections whose time is over."""
        while self._limit_s is not None and self._known:
            oldest = next(iter(self._known.values()))
            if oldest.is_open and oldest.since + self._limit_s > now:
                return
            self.close_oldest()

    def __contains__(self, number: int) -> bool:
        return number in self._known and self._known[number].is_open


class Connections:
    """The open connections of one server."""

    def __init__(self, tls: ssl.SSLContext | None = None, limits: Limits = USUAL) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._waiting, self._asking = Places(limits.waiting, HEAD_S), Places(limits.asking, ANSWER_S)
        self._trusted = Places(limits.trusted, None)
        self._of_holder, self._by_holder = limits.of_holder, dict[str, Places]()
        # Fewer than there are places, or a request would be closed before it was looked at.
        self._accepted_at_once = min(ACCEPTED_AT_ONCE, self._waiting.bound // 2)

    async def serve(self, listeners: Sequence[socket.socket], server: Server) -> None:
        """Accept connections and have a server answer them. Never returns."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._close_late)
            for listener in listeners:
                begin = self._look if self._tls is None else self._shake_hands
                tasks.start_soon(self._accept, listener, partial(begin, server, tasks))

    def close_all(self) -> None:
        """Close all connections."""
        for places in (self._waiting, self._asking, self._trusted):
            while places.close_oldest():
                pass

    def asks(self, request: web.Request) -> None:
        """The head of a request has come on a connection with TLS."""
        connection = self._waiting.pop(_descriptor_of(request))
        if connection is not None:
            connection.since = self._loop.time()
            self._asking.add(connection)

    def trust(self, request: web.Request, holder: str = "") -> None:
        """Give the connection of a request with the secret a place of its kind, and of the holder of the secret."""
        connection = self._asking.pop(_descriptor_of(request))
        if connection is None:
            return
        self._trusted.add(connection)
        if self._of_holder is not None:
            self._by_holder.setdefault(holder, Places((self._of_holder, 1), None)).add(connection)

    def forget(self, holder: str) -> None:
        """Have a holder no places of its own any more, as its secret is not valid now."""
        self._by_holder.pop(holder, None)

    def is_trusted(self, request: web.Request) -> bool:
        """Whether a request of its connection had the secret."""
        return _descriptor_of(request) in self._trusted

    async def _close_late(self) -> None:
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            for places in (self._waiting, self._asking):
                places.close_late(self._loop.time())
            for places in (self._trusted, *self._by_holder.values()):
                places.drop_closed()

    async def _accept(self, listener: socket.socket, begin: Callable[[Connection], None]) -> None:
        while True:
            await anyio.wait_readable(listener)
            for _ in range(self._accepted_at_once):
                try:
                    accepted, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    break
                except OSError:  # no descriptor or no memory is free; no line, as others would fill the log with it
                    if not self._waiting.close_oldest():
                        await anyio.sleep(AGAIN_S)
                    continue
                accepted.setblocking(False)
                connection = Connection(accepted, self._loop)
                self._waiting.add(connection)
                if self._tls is None:
                    self._loop.add_reader(accepted, begin, connection)
                else:
                    begin(connection)

    def _shake_hands(self, server: Server, tasks: anyio.abc.TaskGroup, connection: Connection) -> None:
        tasks.start_soon(connection.hand_over, server, self._tls)

    def _look(self, server: Server, tasks: anyio.abc.TaskGroup, connection: Connection) -> None:
        """Look whether the head of a request is complete. It stays in the kernel's buffer."""
        try:
            head = connection.socket.recv(HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        if HEAD_END in head.lstrip(b"\r\n"):  # the parser passes over empty lines before a request
            self._waiting.pop(connection.socket.fileno())
            connection.stop_looking()
            self._asking.add(connection)
            tasks.start_soon(connection.hand_over, server)
        elif len(head) == connection.head_bytes or len(head) == HEAD_BYTES:  # it has ended, or is too long
            self._waiting.pop(connection.socket.fileno())
            connection.close()
        else:  # call this again once there is more, not because of what is there
            connection.look_after(len(head))


class _Protocol(web.RequestHandler):
    """Takes nothing more from a client that sent bytes that are no HTTP.

    aiohttp's own notes an error for each further piece, and with it the piece. A body that broke off so neither ends
    nor fails there: its handler waits.
    """

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; after the first error fail the body that they belong to, answer what was complete, and close."""
        super().data_received(data)
        if self._close or not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        else:
            body = None if self._current_request is None else self._current_request.content
        if body is not None and not body.is_eof():
            body.set_exception(web.RequestPayloadError("the body of the request is malformed"))
        self.close()


CONNECTIONS: Final = web.AppKey("connections", Connections)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def trust(request: web.Request, holder: str = "") -> None:
    """Give the connection of a request with the secret a place of its kind, and of the holder of the secret."""
    request.app[CONNECTIONS].trust(request, holder)


def has_secret(request: web.Request, secret: str) -> bool:
    """Whether a request has a secret in its header; compared in constant time."""
    given = request.headers.get("Authorization", "")
    # aiohttp keeps bytes that are not UTF-8 in this way
    found = given.removeprefix(SCHEME).encode(errors="surrogateescape")
    return given.startswith(SCHEME) and secrets.compare_digest(found, secret.encode())


@web.middleware
async def _one_request_without_the_secret(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close a connection after a request without the secret, so that each head of its client has HEAD_S."""
    request.app[CONNECTIONS].asks(request)
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    if not request.app[CONNECTIONS].is_trusted(request):
        response.force_close()
    return response


@asynccontextmanager
async def served(
    application: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    limits: Limits = USUAL,
) -> AsyncGenerator[int, None]:
    """Serve an application for the duration of a block, with TLS if there is a context; yield its port.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    with ExitStack() as stack:
        listeners = await _listeners(host, port, stack)
        runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_S)
        application.middlewares.insert(0, _one_request_without_the_secret)
        connections = application[CONNECTIONS] = Connections(tls, limits)
        await runner.setup()
        assert runner.server is not None
        protocol = partial(
            _Protocol,
            runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType] - its type forgets that None is allowed
            logger=log,
            keepalive_timeout=IDLE_S,
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connections.serve, listeners, protocol)
                try:
                    yield listeners[0].getsockname()[1]
                finally:
                    with anyio.CancelScope(shield=True):
                        await runner.cleanup()
                    tasks.cancel_scope.cancel()
        finally:
            connections.close_all()


async def _listeners(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Listen on all addresses of a host, on one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners, problem = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for family, _, _, _, address in dict.fromkeys(found):
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            problem = OSError(error.errno, f"{host_port(host, port)}: {error.strerror}")
            if error.errno == errno.EADDRNOTAVAIL:  # such as ::1 of localhost where there is no IPv6
                continue
            raise problem from None
        port = listener.getsockname()[1]
        listeners.append(listener)
    if not listeners:
        raise problem
    return listeners


def _descriptor_of(request: web.Request) -> int:
    """Return the descriptor of a request's connection; -1: it is closed."""
    transport = request.transport
    return -1 if transport is None else transport.get_extra_info("socket").fileno()


def _is_of_server(record: logging.LogRecord) -> bool:
    """Tell errors of this server from those of its clients, who could fill a log with them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError | web.RequestPayloadError)


log.addFilter(_is_of_server)
