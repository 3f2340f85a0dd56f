"""Starts child processes that cannot outlive the node daemon."""

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, Self

import anyio

from runtime.node.supervisor import guardian

PR_SET_PDEATHSIG = 1
GUARD_END_S = 3.0

_libc = ctypes.CDLL(None, use_errno=True)


class Process(Protocol):
    """What is needed of a child process."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A child process in its own session, with one pipe for its output.

    The session keeps the terminal's Ctrl-C away from it. PR_SET_PDEATHSIG follows the thread that forks, so this must
    be the main thread.
    """

    def __init__(self, process: Process, output: int) -> None:
        self._process = process
        self.pid = process.pid
        self.output = output  # file descriptor to read

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, kept_open: Sequence[int] = ()
    ) -> Self:
        """Start a command.

        Args:
            command: program and arguments.
            environment: its whole environment.
            kept_open: our file descriptors that the child inherits.

        Raises:
            OSError: the command cannot be started.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "children must be started from the main thread: they die with the thread that forked them"
            )
        read_end, write_end = os.pipe()
        try:
            process = await _shielded(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    env=environment,
                    pass_fds=kept_open,
                    start_new_session=True,
                    preexec_fn=dying_with(os.getpid()),  # between fork and exec: one system call, no lock
                )
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return cls(process, read_end)

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, negative for a signal."""
        return await self._process.wait()

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process itself; it stops its own children."""
        if self.running:
            self._process.terminate()

    def reload(self) -> None:
        """Send SIGHUP to the process itself."""
        if self.running:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group."""
        if self.running:
            self._process.kill()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the group is empty
            return


class Guard:
    """Runs the guardian process, reports every session to it, and restarts it when it dies."""

    def __init__(self, mark: str, interpreter: str) -> None:
        self._mark = mark
        self._interpreter = interpreter
        self._sessions: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep a guardian running until cancelled; then let it clean up, and wait for it."""
        try:
            while True:
                self._process = await self._start()
                await self._process.wait()
        finally:
            await self._end()

    def watch(self, session: int) -> None:
        self._sessions.add(session)
        self._send(f"+{session}\n")

    def forget(self, session: int) -> None:
        self._sessions.discard(session)
        self._send(f"-{session}\n")

    async def _start(self) -> asyncio.subprocess.Process:
        process = await _shielded(
            asyncio.create_subprocess_exec(
                self._interpreter,
                *("-I", "-S", guardian.__file__, self._mark),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        )
        assert process.stdin is not None
        process.stdin.writelines([f"+{session}\n".encode() for session in self._sessions])
        return process

    def _send(self, line: str) -> None:
        stdin = None if self._process is None or self._process.returncode is not None else self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(line.encode())

    async def _end(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        with anyio.move_on_after(GUARD_END_S, shield=True):
            await self._process.wait()


async def _shielded(start: Awaitable[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    """Start a process, shielded from cancellation: otherwise a half-started process would have no owner."""
    scope = anyio.CancelScope(shield=True)
    with scope:
        process = await start
        return process
    raise AssertionError(scope)  # a shielded scope swallows no exception


def dying_with(parent: int) -> Callable[[], None]:
    """Return what a child calls between fork and exec, to be killed when its parent ends."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    return prepare
