"""Whether a process serves yet, and whether it still does. Its port is asked: nobody else could tell."""

import asyncio

import anyio

from runtime.settings.processes import (
    AnswersHttp,
    Probe,
    Readiness,
    WhenAnswering,
    WhenConfirmed,
    WhenListening,
    WhenStarted,
)

ASK_INTERVAL_S = 0.03
ANSWER_TIMEOUT_S = 2.0
PROBE_EVERY_S = 5.0
PROBES_PER_LIMIT = 4  # at least, before a server is given up


async def wait_until_ready(readiness: Readiness, pid: int, host: str, port: int) -> None:
    """Return when the process is ready; the caller sets the deadline."""
    match readiness:
        case WhenStarted():
            return
        case WhenConfirmed():
            await readiness.check(pid)
        case WhenListening():
            await _wait_for_answer(host, port, None)
        case WhenAnswering():
            await _wait_for_answer(host, port, readiness.path)


async def wait_until_silent(probe: Probe, host: str, port: int, limit_s: float) -> None:
    """Return when a server has not answered for so long.

    An answer that is only slow counts: a probe has half the limit. Time in which we ourselves stood still does not.
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


async def _responds(probe: Probe, host: str, port: int, timeout_s: float) -> bool:
    """Whether a server says anything."""
    path = probe.path if isinstance(probe, AnswersHttp) else None
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            if path is not None:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
            return bool(await reader.readline())
    except (OSError, TimeoutError, ValueError):  # ValueError: it says more than a line
        return False
    finally:
        if writer is not None:
            writer.close()


async def _wait_for_answer(host: str, port: int, path: str | None) -> None:
    while not await _answers(host, port, path):  # noqa: ASYNC110 - a foreign process: there is no event to wait for
        await anyio.sleep(ASK_INTERVAL_S)


async def _answers(host: str, port: int, path: str | None) -> bool:
    writer = None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            if path is None:
                return True
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
            status = await reader.readline()
            return status.split()[1:2] == [b"200"]
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
