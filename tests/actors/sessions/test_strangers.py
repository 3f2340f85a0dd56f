"""Strangers and broken clients gain nothing from the process of the listener, and its memory stays bounded."""

import asyncio
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import anyio.to_thread
import psutil
import pytest

from actors.sessions.dialects.reading import Dialect, Turn
from actors.sessions.listener import PATHS
from runtime.sessions.link import SOCKET_FILE
from runtime.sessions.turns import TurnRefused
from tests.build.turns import answer
from tests.support.scripted_sessions import ScriptedSessions, connected

ROOT: Final = Path(__file__).parents[3]
SETTINGS: Final = {"hold_every_s": 1, "body_s": 1}
MAX_GROWTH: Final = 200 << 20  # bytes, of a process that reads 8 large bodies at a time
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a\ud83d"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "temperature": 1,
        "stream": True,
    },
    "/v1/responses": {
        "model": "m",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f"}],
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
    },
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0, "max_tokens": 4}},
}
CHAT: Final = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
VALUES: Final = [None, True, -1, 0, 2**63, 2**80, 1e308, "", "x", [], {}, [[]], [None], {"type": "text"}, "\ud800"]


def fuzzed(seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """Bodies with another value somewhere, or other bytes."""
    drawn = random.Random(seed)
    for _ in range(number):
        path = drawn.choice(list(BODIES))
        content = copy.deepcopy(BODIES[path])
        for _ in range(drawn.randrange(3)):
            place = content
            while True:
                key = drawn.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not place[key] or not isinstance(place[key], dict | list) or drawn.random() < 0.3:
                    break
                place = place[key]
            place[key] = copy.deepcopy(drawn.choice(VALUES))
            if not content:
                break
        body = bytearray(json.dumps(content).encode())
        for _ in range(drawn.choice((0, 0, 1, 4))):
            begin = drawn.randrange(len(body) + 1)
            body[begin : begin + drawn.randrange(8)] = drawn.randbytes(drawn.randrange(8))
        yield path, bytes(body)


def outcome_of(dialect: Dialect, body: bytes) -> str:
    try:
        asked = dialect.read(body)
    except TurnRefused as refused:
        return refused.kind
    turn = Turn("t", 7, (answer("x"),) * asked.num_samples)
    written = dialect.answer(asked, turn) + b"".join(dialect.events(asked, turn))
    return "read" if b"t" in written else "nothing"


def test_each_fuzzed_body_is_read_or_refused_by_name() -> None:
    outcomes = Counter(outcome_of(PATHS[path], body) for path, body in fuzzed(1, 10_000))
    assert outcomes.keys() == {"read", "parameter"}
    assert min(outcomes.values()) > 1000


def run_with_process(run_dir: Path, test: Callable[[str, str, psutil.Process], Awaitable[None]]) -> None:
    """Run a test with a listener as a process of its own, a key, and that process; it has to end by SIGTERM."""

    async def running(url: str, process: psutil.Process) -> None:
        sessions = ScriptedSessions("s1")
        with anyio.fail_after(200):
            async with connected(run_dir, sessions):
                await test(url, sessions.pairs["s1"].model.reveal(), process)

    with started(run_dir) as listener:
        try:
            anyio.run(running, url_of(listener), psutil.Process(listener.pid))
            listener.send_signal(signal.SIGTERM)
            assert listener.stderr is not None
            assert listener.wait(20) == 0
            said = listener.stderr.read()
            assert "Traceback" not in said
            assert "physarum-" not in said  # no key
        finally:
            listener.kill()


def started(run_dir: Path) -> subprocess.Popen[str]:
    """Start the process of a listener."""
    environment = {**os.environ, "PHYSARUM_RUN_DIR": str(run_dir), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "actors.sessions", json.dumps(SETTINGS)]
    return subprocess.Popen(command, env=environment, cwd=run_dir, stderr=subprocess.PIPE, text=True)


def url_of(listener: subprocess.Popen[str]) -> str:
    """Wait until a listener says where it listens."""
    assert listener.stderr is not None
    found = re.search(r"http://\S+", listener.stderr.readline())
    assert found
    return found[0]


async def post_all(url: str, key: str, bodies: Iterator[tuple[str, bytes]]) -> set[int]:
    statuses = set[int]()

    async def post(client: aiohttp.ClientSession) -> None:
        for path, body in bodies:
            async with client.post(url + path, data=body, headers={"Authorization": f"Bearer {key}"}) as response:
                statuses.add(response.status)
                await response.read()

    async with aiohttp.ClientSession() as client, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(post, client)
    return statuses


async def send_raw(url: str, sent: bytes, parts: int = 1) -> bytes:
    """Send some bytes again and again, and return what comes before the end of the connection."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for _ in range(parts):
            writer.write(sent)
            await writer.drain()
        return await reader.read(300)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_the_process_bears_strangers(tmp_path: Path) -> None:
    async def test(url: str, key: str, process: psutil.Process) -> None:
        await bear_strangers(url, key, process, num_bodies=300, num_large=2)
        assert (tmp_path / SOCKET_FILE).is_socket()

    run_with_process(tmp_path, test)


def test_a_listener_that_was_killed_is_found_again_where_it_was_with_its_sessions(tmp_path: Path) -> None:
    """The same request gets the answer that it had: the rollout actor samples its turn once."""
    sessions = ScriptedSessions("s1")
    key, body = sessions.pairs["s1"].model.reveal(), ("/v1/chat/completions", json.dumps(CHAT).encode())

    async def ask(url: str) -> set[int]:
        with anyio.fail_after(200):
            return await post_all(url, key, iter([body]))

    async def running() -> None:
        with started(tmp_path) as listener:
            url = await anyio.to_thread.run_sync(url_of, listener)
            async with connected(tmp_path, sessions):
                assert await ask(url) == {200}
                listener.kill()
                await anyio.to_thread.run_sync(listener.wait)
                with started(tmp_path) as again:
                    try:
                        assert await anyio.to_thread.run_sync(url_of, again) == url
                        assert await ask(url) == {200}
                    finally:
                        again.kill()

    anyio.run(running)
    assert [session for session, _ in sessions.turns] == ["s1"]


@pytest.mark.nightly
def test_the_process_bears_many_strangers(tmp_path: Path) -> None:
    async def test(url: str, key: str, process: psutil.Process) -> None:
        await bear_strangers(url, key, process, num_bodies=10_000, num_large=8)

    run_with_process(tmp_path, test)


async def bear_strangers(url: str, key: str, process: psutil.Process, *, num_bodies: int, num_large: int) -> None:
    assert await post_all(url, key, fuzzed(2, 50)) <= {200, 400}
    before = process.memory_info().rss
    assert await post_all(url, key, fuzzed(3, num_bodies)) == {200, 400}
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    large = head + b"Content-Length: 50000000\r\n\r\n" + b" " * (1 << 20)
    late = head + b"Content-Length: 900000\r\n\r\n{"  # and nothing more
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    async with anyio.create_task_group() as tasks:
        for _ in range(num_large):
            for sent, parts in ((large, 50), (chunked, 50), (late, 1)):
                tasks.start_soon(send_raw, url, sent, parts)
        if num_large > 2:
            tasks.start_soon(send_raw, url, b"GET /v1/models HTTP/1.1\r\nx: ")  # the end of the head never comes
        tasks.start_soon(send_raw, url, b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 40_000)
    assert process.memory_info().rss - before < MAX_GROWTH
    assert await send_raw(url, b"GET /session HTTP/1.1\r\nHost: x\r\nOrigin: http://evil.example\r\n\r\n") != b""
    assert await post_all(f"{url}/s/{key}", "", fuzzed(4, 50)) <= {200, 400}
