"""Whether a process serves yet. Its port is asked until it answers: nobody else could tell."""

import asyncio

import anyio

from runtime.agent.processes import Readiness, WhenAnswering, WhenConfirmed, WhenListening, WhenStarted

ASK_INTERVAL_S = 0.03
ANSWER_TIMEOUT_S = 2.0


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
