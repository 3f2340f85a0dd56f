"""The part of the process of users' functions that runs calls of async functions together, in one event loop."""

import asyncio
import os
import threading
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

from runtime.functions.answers import AnswerTogether, raised
from runtime.functions.frames import ANSWERED, CALL, LATE, NUMBER, RAISED, STUCK, FrameBuffer, framed, write_all
from runtime.util.exit_codes import EXIT_OK
from runtime.util.running_time import RunningTime

TICK_S: Final = 0.1
CANCEL_S: Final = 1.0  # time for a call to end once it is cancelled


class _Call(NamedTuple):
    number: int
    timeout_s: float


def serve_together(answer: AnswerTogether, fd_in: int, fd_out: int, buffer: FrameBuffer) -> None:
    """Answer calls until the input ends, then end the process.

    Args:
        answer: answers a call.
        fd_in: descriptor of the calls, each with its number and its seconds.
        fd_out: descriptor of the answers, each with the number of its call, in any order.
        buffer: bytes that were read from `fd_in`.
    """
    asyncio.run(_Calls(answer, fd_out).run(fd_in, buffer))


class _Calls:
    """The running calls. A call that blocks the event loop, or cannot be cancelled, ends the process by its number."""

    def __init__(self, answer: AnswerTogether, fd_out: int) -> None:
        self._answer = answer
        self._fd_out = fd_out
        self._writing = threading.Lock()
        self._running: dict[asyncio.Task[bytes], _Call] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._time = RunningTime(time.monotonic, TICK_S)  # by ticks of a thread
        self._alive_at = time.monotonic()  # when the event loop last ran, less the lost time until then

    async def run(self, fd_in: int, buffer: FrameBuffer) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd_in, "rb", buffering=0)
        )
        ticking = asyncio.create_task(self._tick())
        try:
            while data := await reader.read(1 << 16):
                buffer.feed(data)
                while (frame := buffer.next_frame()) is not None:
                    call, payload = _Call(*CALL.unpack_from(frame)), frame[CALL.size :]
                    answering = asyncio.create_task(self._serve(call, payload))
                    self._answering.add(answering)
                    answering.add_done_callback(self._answering.discard)
        finally:
            ticking.cancel()
            transport.close()
        os._exit(EXIT_OK)  # calls may still run, and may refuse to be cancelled

    async def _serve(self, call: _Call, payload: bytes) -> None:
        task = asyncio.create_task(self._answered(payload))
        self._running[task] = call
        try:
            ended = await self._in_time(task, call.timeout_s)
        finally:
            del self._running[task]
        if not ended:
            stuck = not await _cancelled(task)
            self._write(call, STUCK if stuck else LATE)
            if stuck:
                os._exit(EXIT_OK)
        else:
            self._write(call, RAISED + b"CancelledError()\0" if task.cancelled() else task.result())

    async def _answered(self, payload: bytes) -> bytes:
        """Return the content of the frame that answers a call, but for its number."""
        try:
            return ANSWERED + await self._answer(payload)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the caller hears of it
            return raised(error)

    async def _in_time(self, task: asyncio.Task[bytes], timeout_s: float) -> bool:
        """Wait for a call; time in which the process was suspended does not count. Return whether it ended."""
        left_s = timeout_s
        while left_s > 0 and not task.done():
            lost_s = self._time.lost_s
            await asyncio.wait({task}, timeout=left_s)
            left_s = self._time.lost_s - lost_s
        return task.done()

    async def _tick(self) -> None:
        while True:
            self._alive_at = time.monotonic() - self._time.lost_s
            await asyncio.sleep(TICK_S)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: end the process, by the number of the call, if one step of it takes longer than its timeout."""
        while True:
            self._time.tick()
            time.sleep(TICK_S)
            current: asyncio.Task[Any] | None = asyncio.current_task(loop)
            call = self._running.get(current) if current is not None else None
            if call is not None and time.monotonic() - self._time.lost_s - self._alive_at > call.timeout_s:
                self._write(call, STUCK)
                os._exit(EXIT_OK)

    def _write(self, call: _Call, content: bytes) -> None:
        """Write the answer to a call: its first byte, the call's number, and the rest."""
        with self._writing:
            write_all(self._fd_out, framed(content[:1] + NUMBER.pack(call.number) + content[1:]))


async def _cancelled(task: asyncio.Task[bytes]) -> bool:
    """Cancel a call. Return whether it ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_S)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # so that it is not reported as never retrieved
    return task.done()
