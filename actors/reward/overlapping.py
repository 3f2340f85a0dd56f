"""The part of a grader process that runs calls of async functions together, in one event loop."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from actors.reward.causes import late
from actors.reward.frames import CallEnded, Grade, Graded, GraderSpec, Hello, encode_frame
from actors.reward.graders.calling import Call, grade_together
from runtime.functions.frames import FrameBuffer, FrameError, write_all
from runtime.util.exit_codes import EXIT_OK

TICK_S: Final = 0.1
LATE_S: Final = 0.25  # a tick later than this means that the process was suspended
CANCEL_S: Final = 1.0  # time for a call to end once it is cancelled


def grade_overlapping(
    grader_of: Callable[[GraderSpec], Call], hello: Hello, fd_in: int, fd_out: int, buffer: FrameBuffer
) -> int:
    """Grade until the input ends.

    Args:
        grader_of: finds the function of a grader; raises ValueError.
        hello: the settings of the process.
        fd_in: descriptor of the Grade frames.
        fd_out: descriptor of the CallEnded frames.
        buffer: bytes that were read from `fd_in`.

    Returns:
        The exit code.
    """
    return asyncio.run(_Calls(grader_of, hello, fd_out).run(fd_in, buffer))


class _Calls:
    """The running calls. A call that blocks the event loop, or cannot be cancelled, ends the process by its name."""

    def __init__(self, grader_of: Callable[[GraderSpec], Call], hello: Hello, fd_out: int) -> None:
        self._grader_of = grader_of
        self._hello = hello
        self._fd_out = fd_out
        self._writing = threading.Lock()
        self._running: dict[asyncio.Task[tuple[Graded, ...]], Grade] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._lost_s = 0.0  # time in which the process was suspended, up to the last tick of the thread
        self._due = time.monotonic() + TICK_S  # of the thread's next tick
        self._alive_at = time.monotonic()  # when the event loop last ran, less the lost time until then

    async def run(self, fd_in: int, buffer: FrameBuffer) -> int:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd_in, "rb", buffering=0)
        )
        ticking = asyncio.create_task(self._tick())
        decoder = msgspec.msgpack.Decoder(Grade)
        try:
            while data := await reader.read(1 << 16):
                buffer.feed(data)
                while (frame := buffer.next_frame()) is not None:
                    answering = asyncio.create_task(self._answer(decoder.decode(frame)))
                    self._answering.add(answering)
                    answering.add_done_callback(self._answering.discard)
        finally:
            ticking.cancel()
            transport.close()
        os._exit(EXIT_OK)  # calls may still run, and may refuse to be cancelled

    async def _answer(self, grade: Grade) -> None:
        try:
            grader = self._grader_of(grade.grader)
        except ValueError as error:
            self._write(grade, Graded(error=str(error), cause="refused"))
            return
        hello = self._hello
        call = grade_together(grader, grade.samples, group=grade.grader.group, reward_key=hello.reward_key)
        task = asyncio.create_task(call)
        self._running[task] = grade
        try:
            ended = await self._in_time(task, grade.timeout_s)
        finally:
            del self._running[task]
        if not ended:
            stuck = not await _cancelled(task)
            self._write(grade, _late(grade), last=stuck)
            if stuck:
                os._exit(EXIT_OK)
        elif task.cancelled():
            self._write(grade, Graded(error="raised CancelledError()", cause="raised", of_call=True))
        else:
            self._write(grade, *task.result())

    async def _in_time(self, task: asyncio.Task[tuple[Graded, ...]], timeout_s: float) -> bool:
        """Wait for a call; time in which the process was suspended does not count. Return whether it ended."""
        left_s = timeout_s
        while left_s > 0 and not task.done():
            lost_s = self._lost_now()
            await asyncio.wait({task}, timeout=left_s)
            left_s = self._lost_now() - lost_s
        return task.done()

    def _lost_now(self) -> float:
        """The seconds of suspension, including one that has just ended."""
        late_s = time.monotonic() - self._due
        return self._lost_s + (late_s if late_s > LATE_S else 0.0)

    async def _tick(self) -> None:
        while True:
            self._alive_at = time.monotonic() - self._lost_now()
            await asyncio.sleep(TICK_S)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: end the process, by the name of the call, if one step of it takes longer than its timeout."""
        while True:
            time.sleep(TICK_S)
            self._lost_s, now = self._lost_now(), time.monotonic()
            self._due = now + TICK_S
            current = asyncio.current_task(loop)
            grade = self._running.get(current) if current is not None else None  # type: ignore[arg-type]
            if grade is not None and now - self._lost_s - self._alive_at > grade.timeout_s:
                self._write(grade, _late(grade), last=True)
                os._exit(EXIT_OK)

    def _write(self, grade: Grade, *grades: Graded, last: bool = False) -> None:
        """Write the end of a call: one grade for each of its samples, or one for all of them."""
        found = grades if len(grades) == len(grade.samples) else grades * len(grade.samples)
        try:
            frame = encode_frame(CallEnded(call=grade.call, grades=found, last=last))
        except FrameError as error:
            small = Graded(error=f"the answer is too large: {error}", cause="bad_answer", of_call=True)
            frame = encode_frame(CallEnded(call=grade.call, grades=(small,) * len(grade.samples), last=last))
        with self._writing:
            write_all(self._fd_out, frame)


def _late(grade: Grade) -> Graded:
    return Graded(error=late(grade.timeout_s), cause="timeout", of_call=True)


async def _cancelled(task: "asyncio.Task[tuple[Graded, ...]]") -> bool:
    """Cancel a call. Return whether it ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_S)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # so that it is not reported as never retrieved
    return task.done()
