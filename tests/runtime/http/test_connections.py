"""Half-open requests, and other ways to keep a connection: they cost the owner of a run no place, and no log."""

import asyncio
import errno
import logging
import resource
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import aiohttp
import anyio
import pytest
from aiohttp import web

from runtime.http import connections
from runtime.http.connections import ASKING, TRUSTED, USUAL, Limits, Places, served, trust
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
SECRET = {"Authorization": "yes"}


async def answer(request: web.Request) -> web.StreamResponse:
    if "Authorization" in request.headers:
        trust(request)
    if request.path == "/stream":
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await asyncio.sleep(3600)
    return web.Response(text="answered" if request.path == "/" else "x" * 50_000_000)


@asynccontextmanager
async def serving(limits: Limits = USUAL) -> AsyncGenerator[int]:
    application = web.Application()
    application.router.add_get("/{any:.*}", answer)
    async with served(application, "127.0.0.1", 0, limits=limits) as port:
        yield port


@contextmanager
def connected(port: int, number: int, sent: bytes) -> Generator[list[socket.socket]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(number)]
        for client in clients:
            client.sendall(sent)
            client.setblocking(False)
        yield clients


def has_ended(client: socket.socket) -> bool:
    """Whether the server closed a connection. What it sent is taken."""
    try:
        while client.recv(1 << 20):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def status(port: int, path: str = "/", **headers: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}{path}", headers=headers) as got:
        return got.status


async def test_a_head_that_does_not_end_is_closed_in_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    heads = [b"", b"G", HALF, HALF + b"X: " + b"x" * 20_000, HALF.replace(b"\r\n", b"\n") + b"\n", b"\r\n" * 2]
    async with serving() as port:
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(port, 1, head))[0] for head in heads]
            await asyncio.sleep(0.1)
            for client in clients:
                client.sendall(b"x")  # a byte now and then does not help
            await eventually(lambda: all([has_ended(client) for client in clients]))


async def test_a_head_that_comes_in_pieces_is_answered() -> None:
    async with serving() as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        for at in range(len(WHOLE)):
            await client.send(WHOLE[at : at + 1])
            await anyio.lowlevel.checkpoint()
        assert b"answered" in await client.receive()


async def test_a_head_without_end_is_closed_when_it_is_too_long() -> None:
    async with serving() as port:
        with connected(port, 1, b"GET / HTTP/1.1\r\nX: ") as (client,):
            with anyio.fail_after(200):
                try:
                    while not has_ended(client):
                        await asyncio.get_running_loop().sock_sendall(client, b"x" * 4096)
                except ConnectionError:
                    pass


async def test_the_oldest_without_the_secret_is_closed_and_the_newest_answered() -> None:
    async with serving(Limits(waiting=(4, 4))) as port:
        with connected(port, 4, HALF) as old, connected(port, 3, HALF) as new:
            await eventually(lambda: [has_ended(client) for client in old] == [True, True, True, False])
            assert not any(has_ended(client) for client in new)
            assert await status(port) == 200


@pytest.mark.parametrize("before", [0, 64, 200])
@pytest.mark.parametrize("descriptors", [16, 64, 1024])
async def test_a_request_among_half_open_ones_is_answered_however_few_descriptors_there_are(
    monkeypatch: pytest.MonkeyPatch, before: int, descriptors: int
) -> None:
    """All of them wait to be accepted. A batch that left no place closed the request before it was looked at."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    async with serving() as port:
        with connected(port, before, HALF), connected(port, 1, WHOLE) as (owner,), connected(port, 200, HALF):
            said = b""
            with anyio.fail_after(200):
                while data := await asyncio.get_running_loop().sock_recv(owner, 4096):
                    said += data
            assert said.endswith(b"answered")


async def test_without_a_free_descriptor_the_oldest_half_open_request_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, accepted, refused = socket.socket.accept, list[int](), list[int]()

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if len(accepted) - len(refused) >= 4:
            refused.append(len(accepted))
            raise OSError(errno.EMFILE, "Too many open files")
        accepted.append(1)
        return real(listener)

    slept = list[float]()
    monkeypatch.setattr(connections.anyio, "sleep", lambda seconds: slept.append(seconds) or asyncio.sleep(seconds))
    async with serving() as port:
        monkeypatch.setattr(socket.socket, "accept", accept)
        with connected(port, 20, HALF), connected(port, 1, WHOLE) as (owner,):
            with anyio.fail_after(200):
                assert b"answered" in await asyncio.get_running_loop().sock_recv(owner, 4096)
    assert len(refused) >= 17
    assert connections.AGAIN_S not in slept  # a flood would have cost its owner a pause for each of them


async def test_requests_with_the_secret_have_places_of_their_own() -> None:
    async with serving() as port, aiohttp.ClientSession() as client:
        stream = await client.get(f"http://127.0.0.1:{port}/stream", headers=SECRET)
        assert await stream.content.readexactly(5) == b"begun"
        with connected(port, ASKING[0] + 5, WHOLE.replace(b"/", b"/stream", 1)) as others:
            await eventually(lambda: sum(has_ended(other) for other in others) == 5)
            assert await status(port) == 200
            again = await client.get(f"http://127.0.0.1:{port}/", headers=SECRET)
            assert await again.text() == "answered"
        assert not stream.content.at_eof()
        stream.close()
        streams = [await client.get(f"http://127.0.0.1:{port}/stream", headers=SECRET) for _ in range(TRUSTED[0])]
        assert await status(port, Authorization="yes") == 200
        for one in streams:
            one.close()


async def test_a_client_without_the_secret_has_one_request_a_connection_and_must_take_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", 0.3)
    async with serving() as port:
        with connected(port, 1, WHOLE + HALF) as (client,):
            await eventually(lambda: has_ended(client))
        with connected(port, 1, WHOLE.replace(b"/", b"/large", 1)) as (client,):
            await asyncio.sleep(1)
            taken = 0
            with suppress(ConnectionError):
                while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
                    taken += len(data)
            assert taken < 50_000_000


async def test_bad_requests_are_not_logged(logged: list[logging.LogRecord]) -> None:
    bad = [b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n"]
    bad += [b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", HALF + b"X: " + b"x" * 9000 + b"\r\n\r\n"]
    bad += [WHOLE.replace(b"GET", b"POST") + b"body", HALF + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"]
    async with serving() as port:
        for sent in bad:
            with connected(port, 1, sent) as (client,):
                await eventually(lambda client=client: has_ended(client))
        assert await status(port) == 200
    assert logged == []


async def test_a_client_whose_body_is_malformed_costs_no_memory_and_is_closed(
    logged: list[logging.LogRecord],
) -> None:
    """One whose handler reads, and one whose handler does not yet: what comes after the first error is not kept."""
    begun, waits = asyncio.Event(), asyncio.Event()

    async def read(request: web.Request) -> web.Response:
        trust(request)
        begun.set()
        if request.path == "/later":
            await waits.wait()
        return web.Response(body=await request.read())

    application = web.Application()
    application.router.add_post("/{any:.*}", read)
    async with served(application, "127.0.0.1", 0) as port:
        for path in ("/now", "/later"):
            begun.clear()
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
            with connected(port, 1, head.encode()) as (client,):
                await begun.wait()
                tracemalloc.start()
                with anyio.move_on_after(1), suppress(ConnectionError):
                    for _ in range(40):
                        await asyncio.get_running_loop().sock_sendall(client, b"zz\r\n" + b"\xff" * (1 << 18))
                kept, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert kept < 4 << 20  # of 10 MiB sent, which aiohttp alone keeps with their errors
                waits.set()
                await eventually(lambda client=client: has_ended(client))
    assert logged == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1"])
async def test_each_kind_of_address_is_served(host: str) -> None:
    application = web.Application()
    application.router.add_get("/", answer)
    async with served(application, host, 0) as port, aiohttp.ClientSession() as client:
        place = f"[{host}]" if ":" in host else host
        assert (await client.get(f"http://{place}:{port}/")).status == 200


async def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named() -> None:
    application = web.Application
    async with serving() as port:
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: Address already in use"):
            async with served(application(), "127.0.0.1", port):
                pass
    with pytest.raises(OSError, match=r"192.0.2.1:1: Cannot assign"):
        async with served(application(), "192.0.2.1", 1):
            pass


def test_places_follow_from_the_number_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for descriptors, expected in (
        (1 << 20, 256),
        (1024, 256),
        (256, 64),
        (20, 5),
        (8, 4),
        (resource.RLIM_INFINITY, 256),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=descriptors: (found, found))
        assert Places((256, 4), None).bound == expected
