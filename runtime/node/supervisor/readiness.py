"""Readiness and liveness checks of a process, through its port."""

import aiohttp
import anyio

from runtime.settings.processes import (
    AnswersHttp,
    Greets,
    Question,
    Readiness,
    WhenConfirmed,
    WhenListening,
    WhenStarted,
)

ASK_INTERVAL_S = 0.03
ANSWER_TIMEOUT_S = 2.0
PROBE_EVERY_S = 5.0
PROBES_PER_LIMIT = 4  # at least, before a server counts as unresponsive


async def status_of(url: str, *, timeout_s: float) -> int | None:
    """Status of the answer to a GET; None without an answer in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            return response.status
    except (aiohttp.ClientError, OSError, TimeoutError):
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


async def wait_until_silent(probe: Question, host: str, port: int, limit_s: float) -> None:
    """Return when a server has not answered for `limit_s`.

    A slow answer counts as an answer: a probe waits for half of the limit. Time in which this process itself was
    suspended does not count.
    """
    every_s = min(PROBE_EVERY_S, limit_s / PROBES_PER_LIMIT)
    silent_s = 0.0
    while silent_s < limit_s:
        await anyio.sleep(every_s)
        patience_s = min(limit_s / 2, max(every_s, limit_s - silent_s - every_s))
        began = anyio.current_time()
        if await _responds(probe, host, port, patience_s):
            silent_s = 0.0
        else:
            silent_s += every_s + min(patience_s, anyio.current_time() - began)


async def _responds(probe: Question, host: str, port: int, timeout_s: float) -> bool:
    """Return whether a server answers at all."""
    match probe:
        case AnswersHttp(path):
            return await status_of(f"http://{_in_url(host)}:{port}{path}", timeout_s=timeout_s) is not None
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


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
