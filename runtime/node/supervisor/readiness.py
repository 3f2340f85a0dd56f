"""Readiness and liveness checks of a process: through its port, and by the heartbeats of its event loop."""

import os
from typing import Final

import aiohttp
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


LOOK_EVERY_S: Final = 5.0
LOOKS_PER_LIMIT: Final = 4  # at least, before a process counts as unresponsive
LATE: Final = 2.0  # times the planned wait: this process, and maybe the whole machine, was suspended
FIRST_WITHIN_S: Final = 1800.0  # from the start to the first heartbeat: imports may come from a slow disk
CHUNK: Final = 1 << 16  # bytes: the capacity of a pipe


class Heartbeats:
    """The heartbeat pipe of a process, across its restarts."""

    def __init__(self) -> None:
        self._signs, self.given = os.pipe()  # the process writes to `given`
        os.set_blocking(self._signs, False)

    def had_sign(self) -> bool:
        """Return whether there was a heartbeat since the last check."""
        try:
            return bool(os.read(self._signs, CHUNK))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._signs)
        os.close(self.given)


def stillness(still_s: float, *, waited_s: float, planned_s: float, sign: bool) -> float:
    """Return the seconds without a heartbeat after one more check.

    Args:
        still_s: the same before this check.
        waited_s: time since the previous check.
        planned_s: planned time between checks. A much longer wait resets the count: the process may not have run.
        sign: there was a heartbeat.
    """
    return 0.0 if sign or waited_s > LATE * planned_s else still_s + waited_s


async def wait_until_still(heartbeats: Heartbeats, limit_s: float) -> None:
    """Return when a new process has sent no heartbeat for `limit_s`, or no first one within FIRST_WITHIN_S.

    Args:
        heartbeats: the pipe of its heartbeats.
        limit_s: seconds without a heartbeat, counted over checks that were on time.
    """
    planned_s = min(LOOK_EVERY_S, limit_s / LOOKS_PER_LIMIT)
    heartbeats.had_sign()  # discards those of the previous process
    still_s, patience_s, looked = 0.0, max(limit_s, FIRST_WITHIN_S), anyio.current_time()
    while still_s < patience_s:
        await anyio.sleep(planned_s)
        now, sign = anyio.current_time(), heartbeats.had_sign()
        patience_s = limit_s if sign else patience_s
        still_s = stillness(still_s, waited_s=now - looked, planned_s=planned_s, sign=sign)
        looked = now
