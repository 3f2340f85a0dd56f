"""Readiness and liveness checks of a server, through its port. Heartbeats of actors: heartbeats.py."""

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import anyio

from runtime.bus.addresses import host_port
from runtime.settings.processes import (
    AnswersHttp,
    Greets,
    Question,
    Readiness,
    WhenConfirmed,
    WhenListening,
    WhenStarted,
    probe_interval_s,
    probe_patience_s,
)

ASK_INTERVAL_S = 0.03
ANSWER_TIMEOUT_S = 2.0
MAX_STATUS_LINE_BYTES: Final = 1 << 12

_status_line = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r\n]")


async def status_of(url: str, *, timeout_s: float) -> int | None:
    """Status of the answer to a GET of an http:// URL; None without an answer in time."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    with anyio.move_on_after(timeout_s):
        try:
            async with await anyio.connect_tcp(parts.hostname or "", parts.port or 80) as stream:
                await stream.send(request.encode())
                head = b""
                while b"\n" not in head and len(head) < MAX_STATUS_LINE_BYTES:
                    head += await stream.receive()
                found = _status_line.match(head)
                return int(found[1]) if found else None
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            return None
    return None


async def wait_until_ready(readiness: Readiness, pid: int, host: str, port: int) -> None:
    """Return when the process is ready; the caller sets the deadline."""
    match readiness:
        case WhenStarted():
            return
        case WhenConfirmed():
            await readiness.check(pid)
        case WhenListening():
            while not await _listens(host, port):  # noqa: ASYNC110 - an external process: there is no event
                await anyio.sleep(ASK_INTERVAL_S)


Note = Callable[[float], None]  # gets the seconds of silence after each check


def _ignore(_: float) -> None:
    pass


async def wait_until_silent(probe: Question, host: str, port: int, limit_s: float, note: Note = _ignore) -> None:
    """Return when a server has not answered for `limit_s`.

    A slow answer counts as an answer. Time in which this process itself was suspended does not count.
    """
    every_s = probe_interval_s(limit_s)
    silent_s = 0.0
    while silent_s < limit_s:
        await anyio.sleep(every_s)
        patience_s = probe_patience_s(limit_s, silent_s)
        began = anyio.current_time()
        if await _responds(probe, host, port, patience_s):
            silent_s = 0.0
        else:
            silent_s += every_s + min(patience_s, anyio.current_time() - began)
        note(silent_s)


async def _responds(probe: Question, host: str, port: int, timeout_s: float) -> bool:
    """Return whether a server answers at all."""
    match probe:
        case AnswersHttp(path):
            return await status_of(f"http://{host_port(host, port)}{path}", timeout_s=timeout_s) is not None
        case Greets():
            return await _greets(host, port, timeout_s)


async def _greets(host: str, port: int, timeout_s: float) -> bool:
    with anyio.move_on_after(timeout_s):
        try:
            async with await anyio.connect_tcp(host, port) as stream:
                return bool(await stream.receive())
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            return False
    return False


async def _listens(host: str, port: int) -> bool:
    with anyio.move_on_after(ANSWER_TIMEOUT_S):
        try:
            async with await anyio.connect_tcp(host, port):
                return True
        except OSError:
            return False
    return False
