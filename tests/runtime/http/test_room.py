"""The room of a node: it answers nodes of the run with what was announced, and other clients with a refusal."""

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import aiohttp
import anyio
import pytest

from runtime.bus.nats.certificate import NAME, client_context
from runtime.http import room as room_module
from runtime.http.room import Offered, Room, RoomAddress, open_room

pytestmark = pytest.mark.anyio

CONTENT = bytes(range(256)) * 40
DIGEST = sha256(CONTENT).hexdigest()
OTHER = sha256(b"never announced").hexdigest()
HALF_OPEN = 1000
AS_ANOTHER_USER = r"""
import encodings.idna, json, os, ssl, sys, urllib.error, urllib.request
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
url, *files = sys.argv[1:]
context = ssl._create_unverified_context()
answers = []
for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer "}, {"Cookie": "token=guess"}):
    try:
        answers.append(urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context).status)
    except urllib.error.HTTPError as error:
        answers.append(error.code)
print(json.dumps(answers))
"""


class Opened(NamedTuple):
    room: Room
    address: RoomAddress
    file: Path

    async def get(
        self, path: str = DIGEST, range_: str = "", secret: str | None = None, method: str = "GET"
    ) -> tuple[int, bytes]:
        """Status and content of an answer over the room's certificate."""
        headers = {"Authorization": f"Bearer {self.address.secret if secret is None else secret}"}
        headers |= {"Range": range_} if range_ else {}
        tls = client_context(self.address.certificate)
        url = f"https://{self.address.host}:{self.address.port}/{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, headers=headers, ssl=tls, server_hostname=NAME) as got,
        ):
            return got.status, await got.read()


@asynccontextmanager
async def opened(directory: Path) -> AsyncGenerator[Opened]:
    """A room with one file."""
    file = directory / "weights.safetensors"
    file.write_bytes(CONTENT)
    room = Room()
    room.offer({DIGEST: Offered(file, len(CONTENT))})
    async with open_room(room, "n0", "127.0.0.1", "127.0.0.1", is_home=True) as address:
        yield Opened(room, address, file)


@contextmanager
def half_open(port: int, certificate: str) -> Generator[None]:
    """Connections that say nothing, half of a handshake, or half of a request."""
    context = client_context(certificate)
    with ExitStack() as stack:
        for number in range(HALF_OPEN):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 3 == 1:
                client.sendall(b"\x16\x03\x01\x02")
            elif number % 300 == 2:  # a handshake blocks this thread
                secured = stack.enter_context(_shaken(client, context))
                secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        yield


@contextmanager
def _shaken(client: socket.socket, context: ssl.SSLContext) -> Generator[ssl.SSLSocket]:
    secured = context.wrap_socket(client, server_hostname=NAME)
    try:
        yield secured
    finally:
        secured.close()


async def test_a_node_with_the_secret_reads_what_was_announced(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        assert await at.get() == (200, CONTENT)
        assert await at.get(method="HEAD") == (200, b"")
        assert await at.get(range_="bytes=256-511") == (206, CONTENT[:256])
        assert at.room.sent_bytes == len(CONTENT) + 256


async def test_a_peer_with_the_secret_reads_which_pieces_of_a_manifest_are_here(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        assert (await at.get(f"{DIGEST}/pieces"))[0] == 404  # no manifest
        at.room.offer({OTHER: Offered(at.file, len(CONTENT), held=lambda: b"\xa0")})
        assert await at.get(f"{OTHER}/pieces") == (200, b"\xa0")
        assert (await at.get(f"{OTHER}/pieces", secret=Room().secret.reveal()))[0] == 401
        at.room.withdraw([OTHER])
        assert (await at.get(f"{OTHER}/pieces"))[0] == 404


async def test_nothing_else_is_served(tmp_path: Path) -> None:
    (tmp_path / "join.toml").write_text("password")
    async with opened(tmp_path) as at:
        for path in ("", OTHER, DIGEST[:-1], DIGEST.upper(), f"{DIGEST}/", f"{DIGEST}/../join.toml", "join.toml"):
            assert (await at.get(path))[0] == 404, path
        for path in ("%2e%2e/join.toml", "..%2fjoin.toml", str(at.file), f"?{DIGEST}"):
            assert (await at.get(path))[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await at.get(method=method))[0] == 405, method
        at.room.withdraw([DIGEST])
        assert (await at.get())[0] == 404


@pytest.mark.parametrize("instead", ["link", "folder", "fifo", "longer", "gone"])
async def test_what_took_the_place_of_a_file_is_not_served(tmp_path: Path, instead: str) -> None:
    async with opened(tmp_path) as at:
        at.file.unlink()
        match instead:
            case "link":
                (secret := tmp_path / "secret").write_bytes(CONTENT)
                at.file.symlink_to(secret)
            case "folder":
                at.file.mkdir()
            case "fifo":
                os.mkfifo(at.file)
            case "longer":
                at.file.write_bytes(CONTENT + b"x")
            case _:
                pass
        assert (await at.get())[0] == 404


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=0-0", 206, CONTENT[:1]),
        ("bytes=10000-99999", 206, CONTENT[10000:]),  # clipped, as RFC 9110 has it
        ("bytes=-6", 206, CONTENT[-6:]),
        ("bytes=-999999", 206, CONTENT),
        (f"bytes={len(CONTENT)}-", 416, None),
        ("bytes=99999-100000", 416, None),
        (f"bytes={'9' * 5000}-", 416, None),
        ("bytes=5-2", 416, None),
        ("bytes=-0", 206, CONTENT),  # as aiohttp reads it
        ("bytes=0-1,5-6", 416, None),
        ("bytes=-1--2", 416, None),
        ("lines=1-2", 416, None),
        ("bytes=", 416, None),
    ],
)
async def test_ranges(tmp_path: Path, asked: str, status: int, content: bytes | None) -> None:
    async with opened(tmp_path) as at:
        got = await at.get(range_=asked)
        assert got[0] == status
        assert content is None or got[1] == content


async def test_a_file_on_its_way_is_served_as_far_as_its_pieces_were_verified(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        at.room.offer({DIGEST: Offered(at.file, len(CONTENT), piece_bytes=1024, pieces={0, 2})})
        assert await at.get(range_="bytes=0-1023") == (206, CONTENT[:1024])
        for asked in ("bytes=0-1024", "bytes=1024-1024", "bytes=2047-2048", ""):
            assert (await at.get(range_=asked))[0] == 404, asked
        assert await at.get(range_="bytes=2048-3071") == (206, CONTENT[2048:3072])


async def test_what_was_announced_since_is_found(tmp_path: Path) -> None:
    (file := tmp_path / "later").write_bytes(b"later")
    room = Room(lambda: {OTHER: Offered(file, 5)})
    async with open_room(room, "n0", "127.0.0.1", "127.0.0.1", is_home=True) as address:
        assert await Opened(room, address, file).get(OTHER) == (200, b"later")


async def test_a_further_request_is_refused_while_many_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "MAX_ANSWERS", 0)
    async with opened(tmp_path) as at:
        status, text = await at.get()
        assert (status, text) == (503, b"0 requests are being answered: ask again, or another node.\n")


async def test_another_user_gets_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        command = [sys.executable, "-c", AS_ANOTHER_USER, f"https://127.0.0.1:{at.address.port}/{DIGEST}"]
        ended = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
        assert json.loads(ended.stdout) == [401] * 4, ended.stdout.decode()


async def test_the_secret_of_another_room_or_start_opens_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        for secret in (Room().secret.reveal(), at.address.secret[:-1], f"{at.address.secret}x", "é"):
            assert (await at.get(secret=secret))[0] == 401
            assert (await at.get(OTHER, secret=secret))[0] == 401  # it does not tell what is there either


async def test_half_open_connections_keep_no_node_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as at:
        flood = half_open(at.address.port, at.address.certificate)
        await anyio.to_thread.run_sync(flood.__enter__)
        try:
            with anyio.fail_after(200):
                assert await at.get() == (200, CONTENT)
        finally:
            await anyio.to_thread.run_sync(flood.__exit__, None, None, None)
