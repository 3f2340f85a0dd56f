"""Handle of one grader process: start it, send samples, read grades, kill it.

A batch is answered sample by sample, unlike a call of another function: a process that ends names the sample to blame.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final, Self, TypeVar

import anyio
import anyio.abc
import msgspec

from actors.reward.frames import MAX_FRAME_BYTES, CallEnded, Graded, GraderSpec, Hello
from actors.reward.sandbox import Sandbox
from runtime.functions.child import START_S, Child, UserProcessError
from runtime.util.exit_codes import EXIT_TOO_MANY_PROCESSES

TIDY_S: Final = 2.0  # time for a keeper to kill its grader's descendants
EXIT_GRACE_S: Final = 0.2  # time to read what a process wrote just before it ended
ASYNCHRONOUS: Final = msgspec.msgpack.Decoder(tuple[GraderSpec, ...])
GRADED, CALL_ENDED = msgspec.msgpack.Decoder(Graded), msgspec.msgpack.Decoder(CallEnded)

T = TypeVar("T")


class GraderProcessError(Exception):
    """Base class of grader process errors."""


class GraderStartError(GraderProcessError):
    """A grader process did not start."""


class GraderUnusableError(GraderProcessError, ValueError):
    """A grader cannot be used because of a user's mistake; a restart does not help."""


class GraderProcess(Child):
    """A running grader process. It is its keeper, which ends with the grader and enforces its limits."""

    user, called = "the grader", "the grader process"
    period_s: ClassVar[float] = 10.0

    def __init__(self, process: anyio.abc.Process, max_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(process, max_bytes)
        self._grades: deque[Graded] = deque()  # received, not taken yet
        self.asynchronous: tuple[GraderSpec, ...] = ()  # its graders that are async functions

    @classmethod
    async def start(cls, hello: Hello, sandbox: Sandbox | None = None, *, timeout_s: float = START_S) -> Self:
        """Start a process and wait until its graders are loaded.

        Raises:
            GraderUnusableError: a grader or the sandbox cannot be used; says which and why.
            GraderStartError: the process ended, or did not answer in time.
        """
        sandbox, payload = sandbox or Sandbox(), msgspec.msgpack.encode(hello)
        try:
            words, env = sandbox.command(), sandbox.environment()
            return await cls.open(words, env, timeout_s=timeout_s, hello=payload, max_bytes=MAX_FRAME_BYTES)
        except TimeoutError as error:
            raise GraderStartError(f"a grader process was not ready after {timeout_s:g} s") from error
        except UserProcessError as error:
            raise GraderStartError(f"a grader process did not start: {error}") from error
        except ValueError as error:
            raise GraderUnusableError(str(error)) from None

    def greeted(self, content: bytes) -> None:
        """Learn which of its graders are async functions."""
        self.asynchronous = self._decoded(ASYNCHRONOUS, content)

    @property
    def num_received(self) -> int:
        """Number of grades that can be taken."""
        return len(self._grades)

    async def receive(self, number: int) -> None:
        """Wait until `number` grades can be taken.

        Raises:
            UserProcessError: the process has ended, or violates the protocol.
        """
        while self.num_received < number:
            frame: bytes | None = await self.receive_frame()
            while frame is not None:  # frames that arrived in the same read
                self._grades.append(self._decoded(GRADED, frame))
                frame = self.next_frame()

    async def receive_call(self) -> CallEnded:
        """Wait for the end of a call, in a process that runs calls together. Raises as `receive` does."""
        return self._decoded(CALL_ENDED, await self.receive_frame())

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
        try:
            return decoder.decode(frame)
        except (RecursionError, OverflowError, ValueError) as error:
            raise self.broken(error) from error

    def take(self, number: int) -> list[Graded]:
        """Take the grades of the next samples, in the order in which they were sent."""
        return [self._grades.popleft() for _ in range(number)]

    async def watch_exit(self, then: Callable[[], None]) -> None:
        """Call `then` after the process ended. Its pipe may stay open if a grader has forked."""
        await self._process.wait()
        await anyio.sleep(EXIT_GRACE_S)
        then()

    async def kill(self) -> None:
        """Kill the process and all descendants of its graders, and close its pipes."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with anyio.move_on_after(TIDY_S, shield=True):
                await self._process.wait()
        await super().kill()  # in case the keeper did not kill them

    def ending(self) -> str:
        """Describe how the process ended."""
        if self._process.returncode == EXIT_TOO_MANY_PROCESSES:
            return "the grader was killed: it started more processes than reward.max_processes"
        return super().ending()
