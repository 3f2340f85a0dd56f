"""Handle of one grader process: start it, send samples, read grades, kill it."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.abc
import msgspec
import structlog

from actors.reward.frames import (
    CallEnded,
    FrameBuffer,
    FrameError,
    Graded,
    GraderSpec,
    Hello,
    WorkerReady,
    encode_frame,
)
from actors.reward.sandbox import Sandbox
from runtime.bus.background import in_background
from runtime.util.descendants import children_of
from runtime.util.exit_codes import EXIT_TOO_MANY_PROCESSES
from runtime.util.formatting import signal_name

START_TIMEOUT_S = 30.0  # users' modules may be slow to import
KILL_TIMEOUT_S = 5.0
WROTE = "the grader wrote to the pipe of its process, or its answer is over the limit"
TIDY_S = 2.0  # time for a keeper to kill its grader's descendants
PRINTED_BYTES = 64 << 10  # bytes of a grader's output that are logged per window, so that it cannot fill a disk
PRINTED_WINDOW_S = 10.0
EXIT_GRACE_S = 0.2  # time to read what a process wrote just before it ended

log = structlog.get_logger()


class GraderProcessError(Exception):
    """Base class of grader process errors."""


class GraderStartError(GraderProcessError):
    """A grader process did not start."""


class GraderUnusableError(GraderProcessError, ValueError):
    """A grader cannot be used because of a user's mistake; a restart does not help."""


class GraderDiedError(GraderProcessError):
    """A grader process ended while it was in use."""


class GraderProcess:
    """A running grader process."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr = process.stderr
        self._printed = OutputForwarder(process.pid)
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Graded)
        self._grades: deque[Graded] = deque()  # received, not taken yet
        self.asynchronous: tuple[GraderSpec, ...] = ()  # its graders that are async functions

    @classmethod
    async def start(
        cls, hello: Hello, sandbox: Sandbox | None = None, *, timeout_s: float = START_TIMEOUT_S
    ) -> "GraderProcess":
        """Start a process and wait until its graders are loaded.

        Raises:
            GraderUnusableError: a grader or the sandbox cannot be used; says which and why.
            GraderStartError: the process ended, or did not answer in time.
        """
        sandbox, pipe = sandbox or Sandbox(), subprocess.PIPE
        environment = sandbox.environment()
        process = cls(
            await anyio.open_process(
                sandbox.command(), stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        )
        try:
            async with in_background(process.show_printed):
                ready = await process._greet(hello, timeout_s)
        except BaseException:
            await process.kill()
            raise
        if ready.error is not None:
            await process.kill()
            raise GraderUnusableError(ready.error)
        process.asynchronous = ready.asynchronous
        return process

    async def _greet(self, hello: Hello, timeout_s: float) -> WorkerReady:
        try:
            with anyio.fail_after(timeout_s):
                await self._stdin.send(encode_frame(hello))
                return msgspec.msgpack.decode(await self._receive_frame(), type=WorkerReady)
        except TimeoutError as error:
            raise GraderStartError(f"a grader process was not ready after {timeout_s:g} s") from error
        except (GraderDiedError, anyio.BrokenResourceError, msgspec.DecodeError) as error:
            raise GraderStartError(f"a grader process did not start: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of its keeper, which is also the process group id."""
        return self._process.pid

    async def send(self, frame: bytes) -> None:
        """Send a frame of samples to grade.

        Raises:
            GraderDiedError: the process has ended.
        """
        try:
            await self._stdin.send(frame)
        except anyio.BrokenResourceError as error:
            raise GraderDiedError(await self._await_ending()) from error

    async def flush(self) -> None:
        """Wait until the process has read the rest of a cancelled `send`.

        Raises:
            GraderDiedError: the process has ended.
        """
        await self.send(b"")

    @property
    def num_received(self) -> int:
        """Number of grades that can be taken."""
        return len(self._grades)

    async def receive(self, number: int) -> None:
        """Wait until `number` grades can be taken.

        Raises:
            GraderDiedError: the process has ended, or violates the protocol.
        """
        while self.num_received < number:
            frame: bytes | None = await self._receive_frame()
            while frame is not None:  # frames that arrived in the same read
                self._grades.append(self._grade_of(frame))
                frame = self._next_frame()

    async def receive_call(self) -> CallEnded:
        """Wait for the end of a call, in a process that runs calls together.

        Raises:
            GraderDiedError: the process has ended, or violates the protocol.
        """
        try:
            return msgspec.msgpack.decode(await self._receive_frame(), type=CallEnded)
        except (msgspec.MsgspecError, RecursionError, OverflowError, ValueError) as error:
            raise GraderDiedError(f"{WROTE}: {error}") from error

    def _grade_of(self, frame: bytes) -> Graded:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, OverflowError, ValueError) as error:
            raise GraderDiedError(f"{WROTE}: {error}") from error

    def take(self, number: int) -> list[Graded]:
        """Take the grades of the next samples, in the order in which they were sent."""
        return [self._grades.popleft() for _ in range(number)]

    async def show_printed(self) -> None:
        """Forward output of the process and its graders to stderr, up to a limit, until all have ended."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                self._printed.feed(await self._stderr.receive(1 << 16))

    async def watch_exit(self, then: Callable[[], None]) -> None:
        """Call `then` after the process ended. Its pipe may stay open if a grader has forked."""
        await self._process.wait()
        await anyio.sleep(EXIT_GRACE_S)
        then()

    async def kill(self) -> None:
        """Kill the process and all descendants of its graders, and close its pipes."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_TIMEOUT_S, shield=True):
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
                with anyio.move_on_after(TIDY_S):
                    await self._process.wait()
            for group in (*children_of(self.pid), self.pid):  # in case the keeper did not kill them
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            await self._process.aclose()
            self._printed.end()

    def ending(self) -> str:
        """Describe how the process ended."""
        return describe_exit(self._process.returncode)

    async def _receive_frame(self) -> bytes:
        while (frame := self._next_frame()) is None:
            try:
                self._buffer.feed(await self._stdout.receive(1 << 16))
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                raise GraderDiedError(await self._await_ending()) from error
        return frame

    def _next_frame(self) -> bytes | None:
        try:
            return self._buffer.next_frame()
        except FrameError as error:
            raise GraderDiedError(f"{WROTE}: {error}") from error

    async def _await_ending(self) -> str:
        with anyio.move_on_after(TIDY_S):  # the keeper first kills the grader's descendants
            await self._process.wait()
        return self.ending()


def describe_exit(returncode: int | None) -> str:
    """Describe how a grader process ended."""
    if returncode is None:
        return "the grader process closed its output"
    if returncode == EXIT_TOO_MANY_PROCESSES:
        return "the grader was killed: it started more processes than reward.max_processes"
    if returncode < 0:
        return f"the grader process was killed by {signal_name(-returncode)}"
    return f"the grader process exited with code {returncode}"


class OutputForwarder:
    """Forwards a grader's output to stderr, limited per time window; logs the number of skipped bytes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._left = PRINTED_BYTES
        self._num_left_out = 0

    def feed(self, data: bytes) -> None:
        """Forward printed bytes, as far as the window allows."""
        if time.monotonic() - self._began > PRINTED_WINDOW_S:
            self.end()
            self._began, self._left = time.monotonic(), PRINTED_BYTES
        shown = data[: self._left]
        self._left -= len(shown)
        self._num_left_out += len(data) - len(shown)
        if shown:
            _write(shown)

    def end(self) -> None:
        """Log how many bytes were skipped since the last report."""
        if self._num_left_out:
            _write(b"\n")
            log.warning("grader_output_left_out", pid=self._pid, num_bytes=self._num_left_out)
            self._num_left_out = 0


def _write(data: bytes) -> None:
    sys.stderr.flush()
    while data:
        data = data[os.write(2, data) :]
