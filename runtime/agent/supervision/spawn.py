"""Starting a child process that cannot outlive the agent."""

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

import anyio

from runtime.agent.supervision import guardian

PR_SET_PDEATHSIG = 1
GUARD_END_S = 3.0

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A process in its own session, with one pipe for all that it prints.

    The session keeps Ctrl-C in the terminal from it. PR_SET_PDEATHSIG follows the thread that forks, so it must be
    the main one.
    """

    def __init__(self, process: asyncio.subprocess.Process, output: int) -> None:
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
            environment: all of it.
            kept_open: file descriptors of ours that it has too.

        Raises:
            OSError: it cannot be started.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("children are started from the main thread: they die with the thread that forked them")
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
                    preexec_fn=_dying_with(os.getpid()),  # between fork and exec: one system call, no lock
                )
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return cls(process, read_end)

    async def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        return await self._process.wait()

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def ask_to_stop(self) -> None:
        """SIGTERM to the process itself, which stops those that it started."""
        if self.running:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the process and to its group."""
        if self.running:
            self._process.kill()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody left in the group
            return


class Guard:
    """The guardian process, told of every session; started again when it dies."""

    def __init__(self, mark: str, interpreter: str) -> None:
        self._mark = mark
        self._interpreter = interpreter
        self._sessions: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep a guardian until cancelled; then let it sweep, and wait for it."""
        try:
            while True:
                self._process = await self._start()
                await self._process.wait()
        finally:
            await self._end()

    def watch(self, session: int) -> None:
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def forget(self, session: int) -> None:
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

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

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(line.encode())

    async def _end(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        with anyio.move_on_after(GUARD_END_S, shield=True):
            await self._process.wait()


async def _shielded(start: Awaitable[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    """Start a process whole: cancelled half-way it would be nobody's."""
    scope = anyio.CancelScope(shield=True)
    with scope:
        process = await start
        return process
    raise AssertionError(scope)  # a shielded scope swallows nothing


def _dying_with(agent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it died before the line above
            os._exit(1)

    return prepare
