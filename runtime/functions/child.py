"""A user's function in a process of its own, which can be killed: each kind of the table that has `answering`.

The process and what it started die with its parent. A call that takes too long costs its process, and the next call
starts another one. A data source has another handle, which blocks (actors/buffer/prompts/source_process.py), and
graders have processes of their own kind (actors/reward): docs/develop/where-things-are.md says what each guarantees.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Final

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from runtime.bus.background import in_background
from runtime.functions.limits import (
    LENGTH_BYTES,
    UserLimits,
    end_group,
    end_with_parent,
    environment,
    forward,
    how_ended,
    limit,
    read_call,
    take_pipes,
)
from runtime.functions.table import UserFunction, at
from runtime.util.exit_codes import EXIT_OK
from runtime.util.import_path import user_folder_last
from runtime.util.tracebacks import shown_error, user_frames, user_traceback

Answer = Callable[[bytes], bytes]

START_S: Final = 30.0  # users' modules may be slow to import
KILL_S: Final = 5.0
MAX_BYTES: Final = 256 << 20  # of one call or answer
MAX_TEXT: Final = 1 << 16  # characters of an exception
MAX_STARTS: Final = 2  # processes that may end, or not be ready in time, before one is ready
WHERE_S: Final = 1.0  # to read the stack of a call
STACK, LAST_FRAME = b"(most recent call first):", b"in _run_module_as_main"  # of a stack that faulthandler wrote
PRINTED_LAST_S: Final = 0.2  # to read the last output of a process that ended


class UserProcessError(Exception):
    """The process cannot start, or ended during a call."""


class NotReady(UserProcessError):
    """The process cannot start."""


class UserFunctionError(Exception):
    """The function raised. The message is the repr of its exception.

    Attributes:
        traceback: of the function; empty if it answered with what cannot be used.
    """

    def __init__(self, text: str, trace: str) -> None:
        super().__init__(text)
        self.traceback = trace


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
        self._running: _Running | None = None
        self._one_call = anyio.Lock()
        self.stopped_at = ""  # stack of the function when its newest call was cancelled; empty: unknown

    async def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            ValueError: the function cannot be used.
            NotReady: the process did not start, nor did another one.
        """
        for starts in range(1, MAX_STARTS + 1):
            try:
                return await self._start()
            except UserProcessError as error:
                if starts == MAX_STARTS:
                    raise NotReady(f"loading {self._name}: {error}, {MAX_STARTS} times") from error

    async def _start(self) -> None:
        if self._running is not None:
            return
        process = await anyio.open_process(
            command(self._function, self._key, self._name, self._limits),
            env=environment(self._limits.env),
            start_new_session=True,
        )
        running = self._running = _Running(process)
        try:
            with anyio.fail_after(START_S):
                problem = (await running.receive()).decode()
        except TimeoutError as error:
            await self.kill()
            raise UserProcessError(f"its process was not ready after {START_S:g} s") from error
        except BaseException:
            await self.kill()
            raise
        if problem:
            await self.kill()
            raise ValueError(problem)

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
                with anyio.fail_after(timeout_s):
                    await self._running.send(payload)
                    return await self._running.receive()
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


def command(function: UserFunction, key: str, name: str, limits: UserLimits) -> list[str]:
    """Return the command line of the process of a user's function. Arguments as of `UserProcess`."""
    words = (function.answering, key, name, msgspec.json.encode(limits).decode())
    return [sys.executable, "-P", "-m", "runtime.functions.child", *words]


def framed(payload: bytes) -> bytes:
    """Return a call as its process reads it."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class _Running:
    """The pipes of a process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._stdin, self._stderr = process, process.stdin, process.stderr
        self._stdout = BufferedByteReceiveStream(process.stdout)

    async def send(self, payload: bytes) -> None:
        try:
            await self._stdin.send(framed(payload))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise await self._died() from error

    async def receive(self) -> bytes:
        """Receive an answer, and forward what the function prints until then."""
        self._printed, wait_s = 0, 0.0
        try:
            async with in_background(self._forward):
                return await self._receive()
        except UserProcessError:
            wait_s = PRINTED_LAST_S
            raise
        finally:
            with anyio.move_on_after(wait_s, shield=True):  # 0: what has been read already
                await self._forward()

    async def _forward(self) -> None:
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            while True:
                self._printed = forward(await self._stderr.receive(), self._printed)

    async def _receive(self) -> bytes:
        """Receive an answer: a byte, 0 if the function raised, its length and its content."""
        try:
            head = await self._stdout.receive_exactly(1 + LENGTH_BYTES)
            length = int.from_bytes(head[1:], "big")
            if head[0] > 1 or length > MAX_BYTES:
                raise UserProcessError("it wrote to the pipe of its process, or its answer is too large")
            content = await self._stdout.receive_exactly(length) if length else b""
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise await self._died() from error
        if not head[0]:
            raise UserFunctionError(*content.decode(errors="replace").split("\0", 1))
        return content

    async def where(self) -> str:
        """Return the stack of the running call, which is also forwarded; empty if the process does not write it."""
        text = b""
        with anyio.CancelScope(shield=True), anyio.move_on_after(WHERE_S):
            with suppress(ProcessLookupError, anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                self._process.send_signal(signal.SIGUSR1)
                while LAST_FRAME not in text:
                    text += await self._stderr.receive()
        forward(text, 0)
        return text[text.rfind(STACK) :].decode(errors="replace") if STACK in text else ""

    async def kill(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S, shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            await self._process.aclose()

    async def _died(self) -> UserProcessError:
        with anyio.move_on_after(KILL_S):
            await self._process.wait()
        return UserProcessError(how_ended(self._process.returncode))


def main(arguments: Sequence[str]) -> int:
    """Answer calls on standard input until it ends, then kill this process group. Return an exit code before that."""
    answering, key, name, limits = arguments
    fd_in, fd_out = take_pipes()
    calls, answers = os.fdopen(fd_in, "rb"), os.fdopen(fd_out, "wb")
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # the stack of a call that is to be killed
    end_with_parent(fd_in)
    limit(msgspec.json.decode(limits, type=UserLimits))
    user_folder_last()
    try:
        answer: Answer = at(answering)(key, name)
    except ValueError as error:
        _write(answers, 1, str(error).encode())
        return EXIT_OK
    _write(answers, 1, b"")
    while (payload := read_call(calls)) is not None:
        try:
            _write(answers, 1, answer(payload))
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the caller hears of it
            trace = user_traceback(error)
            with suppress(OSError):  # it may have closed its output
                os.write(2, f"{trace}\n".encode(errors="replace"))
            text = shown_error(error).replace("\0", "")[:MAX_TEXT]
            shown = (
                trace if user_frames(error) is not None else ""
            )  # empty for an answer that is refused: no line of the user's code raised
            _write(answers, 0, f"{text}\0{shown}".encode(errors="replace"))
    end_group()


def _write(answers: BinaryIO, kind: int, content: bytes) -> None:
    answers.write(bytes([kind]) + framed(content))
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
