"""A process of users' code, seen from its parent: start, frames, output and end. All that users write runs in one.

`Child` is the process, perhaps behind a keeper; `UserProcess` calls a function in it, and starts another one after an
end. Calls that run together: `together.py`. docs/develop/where-things-are.md says what each kind guarantees.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import ClassVar, Final, Self

import anyio
from anyio.abc import Process

from runtime.bus.background import in_background
from runtime.functions.frames import ANSWERED, RAISED, FrameBuffer, FrameError, framed
from runtime.functions.limits import UserLimits
from runtime.functions.table import UserFunction
from runtime.util.descendants import children_of
from runtime.util.exit_codes import EXIT_OK, EXIT_TOO_MANY_PROCESSES
from runtime.util.formatting import signal_name

START_S: Final = 30.0  # users' modules may be slow to import
KILL_S: Final = 5.0
TIDY_S: Final = 2.0  # time for a keeper to kill all that its process started
EXIT_GRACE_S: Final = 0.2  # time to read what a process wrote just before it ended
MAX_BYTES: Final = 256 << 20  # of one answer
MAX_STARTS: Final = 2  # processes that may end, or not be ready in time, before one is ready
WHERE_S: Final = 1.0  # to read the stack of a call
STACK, LAST_FRAME = b"(most recent call first):", b"in _run_module_as_main"  # of a stack that faulthandler wrote
READY_S: Final = 0.05  # to find an answer that is there, past the time limit: this process may have been stopped
REST_S: Final = 1.0  # between two pieces of an answer that has begun, past the time limit
PRINTED_BYTES: Final = 64 << 10  # of the output of a call or a period that is logged, so that it cannot fill a disk
PRINTED_LAST_S: Final = 0.2  # to read the last output of a process that ended


class UserProcessError(Exception):
    """The process cannot start, or ended during a call."""


class NotReady(UserProcessError):
    """The process cannot start."""


class BrokenAnswer(UserProcessError):
    """The process wrote what is no answer, or too large a one."""


class UserFunctionError(Exception):
    """The function raised. The message is the repr of its exception.

    Attributes:
        traceback: of the function; empty if it answered with what cannot be used.
    """

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.traceback = trace


class Child:
    """A process that runs users' code, or its keeper, which ends as it does. Created by `open`."""

    user: ClassVar[str] = "it"  # in messages: the function
    called: ClassVar[str] = "its process"  # in messages
    period_s: ClassVar[float] = inf  # after which further output is logged, even within a call

    def __init__(self, process: Process, max_bytes: int, *, is_kept: bool) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._frames = FrameBuffer(max_bytes)
        self._printed = _Output(self.period_s)
        self._is_kept = is_kept
        self.greeting = b""  # what the process says of itself once it is ready

    @classmethod
    async def open(
        cls,
        words: Sequence[str],
        limits: UserLimits,
        *,
        hello: bytes = b"",
        timeout_s: float = START_S,
        max_bytes: int = MAX_BYTES,
    ) -> Self:
        """Start a process and wait until it is ready.

        Args:
            words: `answering` of the function's kind, and its first arguments.
            limits: of the process.
            hello: the last argument of `answering`; empty: it takes none.
            timeout_s: until it is ready.
            max_bytes: of an answer.

        Raises:
            ValueError: the user's code cannot be used; says why.
            TimeoutError: the process was not ready in time.
            UserProcessError: it ended.
        """
        pipe, env = subprocess.PIPE, limits.environment()
        process = await anyio.open_process(
            limits.command(words), stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
        child = cls(process, max_bytes, is_kept=limits.is_kept)
        try:
            async with child.forwarding():
                with anyio.fail_after(timeout_s):
                    await child.send(framed(hello))
                    child.greeting = child.content_of(await child.receive_frame())
            return child
        except UserFunctionError as error:
            await child.kill()
            raise ValueError(str(error)) from None
        except BaseException:
            await child.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id, which is also the process group id."""
        return self._process.pid

    async def exchange(self, payload: bytes, timeout_s: float) -> bytes:
        """Call the function, and return its answer. Forwards what it prints until then.

        Raises:
            TimeoutError: there was no answer in that time.
            UserFunctionError: the function raised.
            UserProcessError: the process ended.
        """
        async with self.forwarding():
            answer = self.content_of(await self._answer(framed(payload), timeout_s))
        if self._frames:
            raise self.broken("an answer without a call")
        return answer

    async def _answer(self, frame: bytes, timeout_s: float) -> bytes:
        with anyio.move_on_after(timeout_s):
            await self.send(frame)
            return await self.receive_frame()
        while (answer := self.next_frame()) is None:
            with anyio.fail_after(REST_S if self._frames else READY_S):
                await self._read()
        return answer

    async def send(self, frame: bytes) -> None:
        """Send a frame; an empty one waits until the process has read the rest of a `send` that was cancelled.

        Raises:
            UserProcessError: the process has ended.
        """
        try:
            await self._stdin.send(frame)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise await self._died() from error

    async def receive_frame(self) -> bytes:
        """Wait for the content of a frame.

        Raises:
            UserProcessError: the process has ended, or writes something else.
        """
        while (frame := self.next_frame()) is None:
            await self._read()
        return frame

    def next_frame(self) -> bytes | None:
        """Return the content of a frame that has been read already. Raises as `receive_frame` does."""
        try:
            return self._frames.next_frame()
        except FrameError as error:
            raise self.broken(error) from error

    async def _read(self) -> None:
        try:
            self._frames.feed(await self._stdout.receive(1 << 16))
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise await self._died() from error

    def content_of(self, frame: bytes) -> bytes:
        """Return what the function answered.

        Args:
            frame: the content of the frame.

        Raises:
            UserFunctionError: it raised.
            BrokenAnswer: the frame is no answer.
        """
        kind, content = frame[:1], frame[1:]
        if kind == RAISED:
            text, _, trace = content.decode(errors="replace").partition("\0")
            raise UserFunctionError(text, trace)
        if kind != ANSWERED:
            raise self.broken("no answer")
        return content

    def broken(self, what: object) -> BrokenAnswer:
        """Return the error of a process that wrote something else."""
        return BrokenAnswer(f"{self.user} wrote to the pipe of its process, or its answer is too large: {what}")

    @asynccontextmanager
    async def forwarding(self) -> AsyncGenerator[None]:
        """Forward what the process prints during a block, up to a limit, and for a moment if the process ends."""
        wait_s = 0.0  # what has been read already
        try:
            async with in_background(self.forward):
                yield
        except UserProcessError:
            wait_s = PRINTED_LAST_S
            raise
        finally:
            with anyio.move_on_after(wait_s, shield=True):
                await self.forward()
            self._printed.end()

    async def forward(self) -> None:
        """Forward what the process prints, up to a limit, until it and all that it started have ended."""
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                self._printed.feed(await self._stderr.receive(1 << 16))

    async def where(self) -> str:
        """Return the stack of the running call, which is also forwarded; empty if the process does not write it."""
        text = b""
        with anyio.CancelScope(shield=True), anyio.move_on_after(WHERE_S):
            with suppress(ProcessLookupError, anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                self._process.send_signal(signal.SIGUSR1)
                while LAST_FRAME not in text:
                    text += await self._stderr.receive()
        self._printed.feed(text)
        return text[text.rfind(STACK) :].decode(errors="replace") if STACK in text else ""

    async def watch_exit(self, then: Callable[[], None]) -> None:
        """Call `then` after the process ended. Its pipe may stay open if users' code has forked."""
        await self._process.wait()
        await anyio.sleep(EXIT_GRACE_S)
        then()

    async def kill(self) -> None:
        """Kill the process and what it started, and close its pipes. A keeper finds daemons too."""
        if self._is_kept and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with anyio.move_on_after(TIDY_S, shield=True):
                await self._process.wait()
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S, shield=True):
            children = children_of(self.pid) if self._process.returncode is None else ()  # else the id may be another's
            for group in (*children, self.pid):  # a child may lead a group of its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            await self._process.aclose()
        self._printed.end()

    def ending(self) -> str:
        """Describe how the process ended."""
        code = self._process.returncode
        if code is None:
            return f"{self.called} closed its output"
        if self._is_kept and code == EXIT_TOO_MANY_PROCESSES:
            return f"{self.user} was killed: it started more processes than reward.max_processes"
        if code < 0:
            return f"{self.called} was killed by {signal_name(-code)}"
        return f"{self.called} ended" if code == EXIT_OK else f"{self.called} exited with code {code}"

    async def _died(self) -> UserProcessError:
        with anyio.move_on_after(KILL_S):
            await self._process.wait()
        return UserProcessError(self.ending())


class _Output:
    """Forwards what users' code prints to stderr, up to PRINTED_BYTES of each call or period. Blocks."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._began, self._num_bytes = period_s, time.monotonic(), 0

    def feed(self, data: bytes) -> None:
        """Forward printed bytes, as far as the limit allows."""
        if time.monotonic() - self._began > self._period_s:
            self.end()
        _print(data[: max(0, PRINTED_BYTES - self._num_bytes)])
        self._num_bytes += len(data)

    def end(self) -> None:
        """Begin another call or period, and say how much of this one was left out."""
        left_out = self._num_bytes - PRINTED_BYTES
        self._began, self._num_bytes = time.monotonic(), 0
        if left_out > 0:
            _print(f"\n(further output is left out: {left_out} B)\n".encode())


def _print(data: bytes) -> None:
    sys.stderr.flush()
    while data:
        data = data[os.write(2, data) :]


class UserProcess:
    """A user's function, called with bytes in another process, one call at a time."""

    def __init__(self, function: UserFunction, key: str, name: str, limits: UserLimits) -> None:
        """Describe the process; `start` or the first call starts it.

        Args:
            function: kind of the user's function, whose `answering` the process calls with key and name.
            key: setting that names it.
            name: of the user's function.
            limits: of the process.
        """
        self._function, self._key, self._name, self._limits = function, key, name, limits
        self._running: Child | None = None
        self._one_call = anyio.Lock()
        self.stopped_at = ""  # stack of the function when its newest call was cancelled; empty: unknown

    async def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            ValueError: the function cannot be used.
            NotReady: the process did not start, nor did another one.
        """
        words = (self._function.answering, self._key, self._name)
        for starts in range(1, MAX_STARTS + 1):
            if self._running is not None:
                return
            try:
                self._running = await Child.open(words, self._limits)
            except (TimeoutError, UserProcessError) as error:
                if starts == MAX_STARTS:
                    late = f"its process was not ready after {START_S:g} s"
                    reason = late if isinstance(error, TimeoutError) else error
                    raise NotReady(f"loading {self._name}: {reason}, {MAX_STARTS} times") from error

    async def call(self, payload: bytes, *, timeout_s: float) -> bytes:
        """Call the function, once it has answered earlier calls. A call that is cancelled or late kills the process.

        Args:
            payload: what `answering` gets.
            timeout_s: for the answer, from the begin of this call in a process that is ready.

        Raises:
            TimeoutError: there was no answer in that time.
            UserFunctionError: the function raised.
            UserProcessError: the process ended.
            ValueError: the function cannot be used any more.
        """
        async with self._one_call:
            await self.start()
            assert self._running is not None
            try:
                return await self._running.exchange(payload, timeout_s)
            except UserFunctionError:
                raise
            except UserProcessError:
                await self.kill()
                raise
            except BaseException:
                self.stopped_at = await self._running.where()
                await self.kill()
                raise

    async def kill(self) -> None:
        """Kill the process and what it started, if it runs."""
        running, self._running = self._running, None
        if running is not None:
            await running.kill()
