"""The read-only room of a node: an HTTP server that gives other nodes of the run what was announced, by its digest.

A path is a digest, and only digests that were offered are answered. A digest leads to a file by a table in memory, so
no request names a file. A file that is still being fetched is served as far as its pieces were verified, and a peer
may ask which ones these are.
"""

import os
import ssl
import stat
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web

from runtime.bus.addresses import host_port
from runtime.bus.nats.certificate import own_certificate
from runtime.http.connections import MAX_BODY_BYTES, SEND_S, Handler, has_secret, served, trust
from runtime.util.secrets import Secret

MAX_ANSWERS: Final = 8  # with content at a time; a further request gets 503, and asks another node or again
PART_BYTES: Final = 1 << 20  # read from the disk at a time
PIECES: Final = "/pieces"  # after a manifest's digest
HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


class RoomAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's room is, as the run's bucket has it. External clients cannot read the bucket."""

    node: str
    host: str
    port: int
    secret: str  # of this room alone, renewed with each start of its node daemon
    certificate: str  # PEM, of this node alone
    is_home: bool = False  # it has all that is announced


class Offered(NamedTuple):
    """A file under its digest."""

    path: Path
    size_bytes: int
    piece_bytes: int = 0  # size of its pieces; 0: the file is complete
    pieces: Collection[int] = ()  # indices of the pieces that are there
    held: Callable[[], bytes] | None = None  # of a manifest: a bit for each piece of its files that is there


class Room:
    """The content of a room, and its HTTP side.

    Args:
        look: returns what was announced since, for a digest that was not offered; called on a thread.
    """

    def __init__(self, look: Callable[[], Mapping[str, Offered]] = dict) -> None:
        self.secret = Secret.random()
        self.sent_bytes = 0  # of files
        self._offered: dict[str, Offered] = {}
        self._look = look
        self._looking = anyio.Lock()
        self._answers = 0

    def offer(self, offered: Mapping[str, Offered]) -> None:
        """Serve files under their digests. Safe to call from any thread."""
        self._offered |= offered

    def withdraw(self, digests: Collection[str]) -> None:
        """Serve these digests no longer. Safe to call from any thread."""
        for digest in digests:
            self._offered.pop(digest, None)

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        application.router.add_get("/{digest:[0-9a-f]{64}}", self._file)
        application.router.add_get("/{digest:[0-9a-f]{64}}" + PIECES, self._held)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not has_secret(request, self.secret.reveal()):
            return _refused(401, "This room is for the nodes of its run.")
        trust(request)
        return await handler(request)

    async def _held(self, request: web.Request) -> web.Response:
        """Answer which pieces of a manifest's files are here: a bit each, in the manifest's order."""
        offered = self._offered.get(request.match_info["digest"])
        if offered is None or offered.held is None:
            return _refused(404, "No files of this digest are fetched here.")
        return web.Response(body=offered.held(), content_type="application/octet-stream", headers=HEADERS)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        offered = self._offered.get(digest)
        if offered is None:
            async with self._looking:
                self.offer(await anyio.to_thread.run_sync(self._look))
            offered = self._offered.get(digest)
        if offered is None:
            return _refused(404, "This run announced no such digest here.")
        try:
            begin, end = _range_of(request, offered.size_bytes)
        except ValueError as error:
            headers = {"Content-Range": f"bytes */{offered.size_bytes}"}
            return _refused(416, f"{error}; it has {offered.size_bytes} bytes.", headers)
        if offered.piece_bytes and not _has(offered, begin, end):
            return _refused(404, "These bytes have not come here yet.")
        if self._answers >= MAX_ANSWERS:
            return _refused(503, f"{MAX_ANSWERS} requests are being answered: ask again, or another node.")
        self._answers += 1
        try:
            return await self._answer(request, offered, begin, end)
        finally:
            self._answers -= 1

    async def _answer(self, request: web.Request, offered: Offered, begin: int, end: int) -> web.StreamResponse:
        try:
            opened = await anyio.to_thread.run_sync(_opened, offered)
        except OSError:  # it was deleted since
            return _refused(404, "It is not here any more.")
        try:
            headers = {**HEADERS, "Content-Length": str(end - begin), "Accept-Ranges": "bytes"}
            is_part = "Range" in request.headers
            if is_part:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{offered.size_bytes}"
            response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
            response.content_type = "application/octet-stream"
            await response.prepare(request)
            while begin < end and request.method != "HEAD":
                part = await anyio.to_thread.run_sync(os.pread, opened, min(PART_BYTES, end - begin), begin)
                if not part:
                    raise ConnectionAbortedError(f"{offered.path} is shorter than announced")
                with anyio.fail_after(SEND_S):
                    await response.write(part)
                begin += len(part)
                self.sent_bytes += len(part)
            return response
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # the client must not take this for the end
            return web.Response(status=499)
        finally:
            os.close(opened)


@asynccontextmanager
async def open_room(room: Room, node: str, host: str, announced: str, *, is_home: bool) -> AsyncGenerator[RoomAddress]:
    """Serve a room over TLS for the duration of a block; yield its address.

    Args:
        room: of this node.
        node: its name.
        host: IP address to listen at, on any free port.
        announced: the host by which others reach it.
        is_home: whether this node has all that is announced.

    Raises:
        OSError: the address is not of this machine.
    """
    with tempfile.TemporaryDirectory(prefix="physarum-room-") as place:  # only its owner can read it
        certificate = await anyio.to_thread.run_sync(own_certificate, Path(place))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate.certificate, certificate.key)
        pem = certificate.pem()
    async with served(room.application(), host, 0, tls) as port:
        yield RoomAddress(
            node=node, host=announced, port=port, secret=room.secret.reveal(), certificate=pem, is_home=is_home
        )


def shown(address: RoomAddress) -> str:
    """Return how an error names a room."""
    return f"node {address.node} ({host_port(address.host, address.port)})"


def _range_of(request: web.Request, size_bytes: int) -> tuple[int, int]:
    """Return the bytes that a request is for: from the first to one after the last.

    Raises:
        ValueError: it names several ranges, or begins beyond the end.
    """
    asked = request.http_range
    begin, end, _ = asked.indices(size_bytes)
    if "Range" in request.headers and (begin >= end or (asked.start or 0) >= size_bytes):
        raise ValueError(f"the range {request.headers['Range']!r} has none of its bytes")
    return begin, end


def _has(offered: Offered, begin: int, end: int) -> bool:
    first, last = begin // offered.piece_bytes, (end - 1) // offered.piece_bytes
    return all(index in offered.pieces for index in range(first, last + 1))


def _opened(offered: Offered) -> int:
    """Open a file, but no link, and no file of another size than announced."""
    opened = os.open(offered.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(opened)
    if stat.S_ISREG(found.st_mode) and found.st_size == offered.size_bytes:
        return opened
    os.close(opened)
    raise OSError(f"{offered.path} is not the file that was announced")


def _refused(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers={**HEADERS, **(headers or {})})
