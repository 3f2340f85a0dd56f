"""One grader process, as its pool sees it: start it, send it samples, read grades, kill it."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from actors.reward.frames import FrameBuffer, FrameError, Grade, Graded, Hello, Ready, encode_frame
from runtime.wording import signal_name

ROOT = Path(__file__).resolve().parents[2]  # where `actors` can be imported from
START_TIMEOUT_S = 30.0  # a user's module may import much
KILL_TIMEOUT_S = 5.0
EXIT_GRACE_S = 0.2  # for what a process wrote just before it ended


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
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Graded)
        self._grades: deque[Graded] = deque()  # received and not taken

    @classmethod
    async def start(cls, hello: Hello, *, timeout_s: float = START_TIMEOUT_S) -> "GraderProcess":
        """Start a process and wait until it has its graders.

        Raises:
            GraderUnusableError: it cannot use a grader; says which and why.
            GraderStartError: it ended, or did not answer in time.
        """
        command = [sys.executable, "-P", "-m", "actors.reward.worker", str(os.getpid())]
        pipe = subprocess.PIPE
        started = await anyio.open_process(
            command, stdin=pipe, stdout=pipe, stderr=None, env=_environment(), start_new_session=True
        )
        process = cls(started)
        try:
            with anyio.fail_after(timeout_s):
                await process._stdin.send(encode_frame(hello))
                ready = msgspec.msgpack.decode(await process._receive_frame(), type=Ready)
        except TimeoutError as error:
            await process.kill()
            raise GraderStartError(f"a grader process was not ready after {timeout_s:g} s") from error
        except (GraderDiedError, anyio.BrokenResourceError, msgspec.DecodeError) as error:
            await process.kill()
            raise GraderStartError(f"a grader process did not start: {error}") from error
        except BaseException:
            await process.kill()
            raise
        if ready.error is not None:
            await process.kill()
            raise GraderUnusableError(ready.error)
        return process

    @property
    def pid(self) -> int:
        """Of the process, which is also its process group."""
        return self._process.pid

    async def send(self, grade: Grade) -> None:
        """Give it samples to grade.

        Raises:
            GraderDiedError: it has ended.
        """
        try:
            await self._stdin.send(encode_frame(grade))
        except anyio.BrokenResourceError as error:
            raise GraderDiedError(await self._await_ending()) from error

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
                self._grades.append(self._decoder.decode(frame))
                frame = self._next_frame()

    def take(self, number: int) -> list[Graded]:
        """The grades of the next samples that were sent, in their order."""
        return [self._grades.popleft() for _ in range(number)]

    async def watch_exit(self, then: Callable[[], None]) -> None:
        """Call `then` after the process ended. Its pipe may outlive it when a grader has forked."""
        await self._process.wait()
        await anyio.sleep(EXIT_GRACE_S)
        then()

    async def kill(self) -> None:
        """End the process and all that its graders started, and free its pipes."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_TIMEOUT_S, shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.aclose()

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
            raise GraderDiedError(f"its grader wrote to the pool's pipe: {error}") from error

    async def _await_ending(self) -> str:
        with anyio.move_on_after(EXIT_GRACE_S):
            await self._process.wait()
        return self.ending()


def describe_exit(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None:
        return "the grader process closed its output"
    if returncode < 0:
        return f"the grader process was killed by {signal_name(-returncode)}"
    return f"the grader process exited with code {returncode}"


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # one thread each: there are as many processes as wanted, and more threads only get in their way
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
