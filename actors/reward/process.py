"""One grader process, as its pool sees it: start it, send it samples, read grades, kill it."""

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

from actors.reward.frames import FrameBuffer, FrameError, Graded, Hello, WorkerReady, encode_frame
from actors.reward.keeper import children_of
from actors.reward.sandbox import Sandbox
from runtime.bus.background import beside
from runtime.exit_codes import EXIT_TOO_MANY_PROCESSES
from runtime.wording import signal_name

START_TIMEOUT_S = 30.0  # a user's module may import much
KILL_TIMEOUT_S = 5.0
WROTE = "the grader wrote to the pipe of its process, or its answer is over the limit"
TIDY_S = 2.0  # for a keeper to end what its grader started
PRINTED_BYTES = 64 << 10  # of what a grader prints, shown in each window of time: it cannot fill a disk
PRINTED_WINDOW_S = 10.0
EXIT_GRACE_S = 0.2  # for what a process wrote just before it ended

log = structlog.get_logger()


class GraderProcessError(Exception):
    """Base of what goes wrong with a grader process."""


class GraderStartError(GraderProcessError):
    """A process did not come up."""


class GraderUnusableError(GraderProcessError, ValueError):
    """A grader cannot be used: the user's mistake, which another start does not mend."""


class GraderDiedError(GraderProcessError):
    """A process ended while it was needed."""


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
        self._printed = Printed(process.pid)
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Graded)
        self._grades: deque[Graded] = deque()  # received and not taken

    @classmethod
    async def start(
        cls, hello: Hello, sandbox: Sandbox | None = None, *, timeout_s: float = START_TIMEOUT_S
    ) -> "GraderProcess":
        """Start a process and wait until it has its graders.

        Raises:
            GraderUnusableError: it cannot use a grader, or not have its sandbox; says which and why.
            GraderStartError: it ended, or did not answer in time.
        """
        sandbox, pipe = sandbox or Sandbox(), subprocess.PIPE
        environment = sandbox.environment()
        process = cls(
            await anyio.open_process(
                sandbox.command(), stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
            )
        )
        try:
            async with beside(process.show_printed):
                ready = await process._greet(hello, timeout_s)
        except BaseException:
            await process.kill()
            raise
        if ready.error is not None:
            await process.kill()
            raise GraderUnusableError(ready.error)
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
        """Of its keeper, which is also its process group."""
        return self._process.pid

    async def send(self, frame: bytes) -> None:
        """Give it samples to grade, as a frame.

        Raises:
            GraderDiedError: it has ended.
        """
        try:
            await self._stdin.send(frame)
        except anyio.BrokenResourceError as error:
            raise GraderDiedError(await self._await_ending()) from error

    async def flush(self) -> None:
        """Wait until it has taken what a cancelled `send` left.

        Raises:
            GraderDiedError: it has ended.
        """
        await self.send(b"")

    @property
    def num_received(self) -> int:
        """Grades that can be taken."""
        return len(self._grades)

    async def receive(self, number: int) -> None:
        """Wait until so many grades can be taken.

        Raises:
            GraderDiedError: it has ended, or does not speak our protocol.
        """
        while self.num_received < number:
            frame: bytes | None = await self._receive_frame()
            while frame is not None:  # what has arrived together
                self._grades.append(self._grade_of(frame))
                frame = self._next_frame()

    def _grade_of(self, frame: bytes) -> Graded:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, OverflowError, ValueError) as error:
            raise GraderDiedError(f"{WROTE}: {error}") from error

    def take(self, number: int) -> list[Graded]:
        """The grades of the next samples that were sent, in their order."""
        return [self._grades.popleft() for _ in range(number)]

    async def show_printed(self) -> None:
        """Show what the process and its graders print, a bounded part of it, until all have ended."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                self._printed.feed(await self._stderr.receive(1 << 16))

    async def watch_exit(self, then: Callable[[], None]) -> None:
        """Call `then` after the process ended. Its pipe may outlive it when a grader has forked."""
        await self._process.wait()
        await anyio.sleep(EXIT_GRACE_S)
        then()

    async def kill(self) -> None:
        """End the process and all that its graders started, and free its pipes."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_TIMEOUT_S, shield=True):
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
                with anyio.move_on_after(TIDY_S):
                    await self._process.wait()
            for group in (*children_of(self.pid), self.pid):  # what is left if the keeper did not do it
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            await self._process.aclose()
            self._printed.end()

    def ending(self) -> str:
        """How it ended, in words."""
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
        with anyio.move_on_after(TIDY_S):  # the keeper first ends what the grader left
            await self._process.wait()
        return self.ending()


def describe_exit(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None:
        return "the grader process closed its output"
    if returncode == EXIT_TOO_MANY_PROCESSES:
        return "the grader was killed: it started more processes than reward.max_processes"
    if returncode < 0:
        return f"the grader process was killed by {signal_name(-returncode)}"
    return f"the grader process exited with code {returncode}"


class Printed:
    """Shows what a grader prints: the first bytes of each window of time, and how many more there were."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._left = PRINTED_BYTES
        self._num_left_out = 0

    def feed(self, data: bytes) -> None:
        """Take what was printed."""
        if time.monotonic() - self._began > PRINTED_WINDOW_S:
            self.end()
            self._began, self._left = time.monotonic(), PRINTED_BYTES
        shown = data[: self._left]
        self._left -= len(shown)
        self._num_left_out += len(data) - len(shown)
        if shown:
            _write(shown)

    def end(self) -> None:
        """Say what was left out so far."""
        if self._num_left_out:
            _write(b"\n")
            log.warning("grader_output_left_out", pid=self._pid, num_bytes=self._num_left_out)
            self._num_left_out = 0


def _write(data: bytes) -> None:
    sys.stderr.flush()
    while data:
        data = data[os.write(2, data) :]
