"""Starts processes as forks of a template process, which has imported what they need; see template_process.py."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import structlog

from runtime.node.supervisor.heartbeats import STOPPED
from runtime.node.supervisor.spawn import Child, Guard, dying_with
from runtime.settings.devices import HIDDEN, ON_CPU
from runtime.settings.processes import OURS, ProcessSpec
from runtime.util.descendants import set_subreaper
from runtime.util.errors import flatten
from runtime.util.proc import STATE, stat_of

log = structlog.get_logger()

LIMIT_S: Final = 60.0  # for an answer: imports on a busy machine take long
LOOK_S: Final = 0.25  # between two looks whether the template is stopped
REAP_S: Final = 3.0  # for the end of killed processes
REAP_EVERY_S: Final = 0.01
PROGRAM: Final = "from runtime.node.supervisor.template_process import main; main({})"
READY: Final = "ready"  # answer of the template
MAX_ANSWER_BYTES: Final = 1 << 16
# Variables that are read after the imports. A process that differs from the template in another one is not forked.
READ_LATE: Final = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", *ON_CPU})
OWN_VARIABLES: Final = "PHYSARUM_"
INHERITED: Final = ("Umask:", "SigBlk:", "SigIgn:", "NoNewPrivs:")  # lines of /proc/self/status


class _Failed(Exception):
    """The template cannot be used any more; the text says why."""


class _Request:
    """A process to fork, and what came of it."""

    def __init__(
        self, key: tuple[str, ...], command: Sequence[str], environment: Mapping[str, str], kept_open: Sequence[int]
    ) -> None:
        self.key, self.command, self.environment, self.kept_open = key, command, environment, kept_open
        self.answered = anyio.Event()
        self.child: Child | None = None


class Forked:
    """A process that was forked by the template, and is a child of this process. Not a process of asyncio."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    async def wait(self) -> int:
        """Wait until it ends; return its exit code."""
        while (code := self.returncode) is None:
            await anyio.wait_readable(self._descriptor)
        if self._descriptor >= 0:  # closed here alone: a wait for a closed descriptor never ends
            os.close(self._descriptor)
            self._descriptor = -1
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)  # its id is not given to another process before it is waited for

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The template of a node: starts it, asks it for processes, and stops using it after its first failure.

    Forked processes have the same parent, session, command line, environment and descriptors as started ones. If the
    template dies, is stopped or does not answer, the caller starts its process itself.

    Args:
        environment: that of all processes of this node, without what each adds.
        guard: kills the template if this process is killed.
    """

    def __init__(self, environment: Mapping[str, str], guard: Guard) -> None:
        self.limit_s = LIMIT_S
        self._environment = {**environment, **OURS, **HIDDEN}
        self.guard = guard
        self._conditions: tuple[object, ...] = ()
        self._wanted: deque[tuple[str, ...]] = deque()  # commands to prepare
        self._prepared: dict[tuple[str, ...], str] = {}  # by command: READY, or why it is not forked
        self._requests: list[_Request] = []
        self._work = anyio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._runs = False

    @property
    def pid(self) -> int | None:
        """Its process id while it is in use."""
        return None if self._process is None or not self._runs else self._process.pid

    def prepare(self, specs: Iterable[ProcessSpec]) -> None:
        """Import what these processes need. The first one that may be forked starts the template."""
        ours = [spec for spec in specs if spec.forked and _may_be_forked(spec.command)]
        ours.sort(key=lambda spec: HIDDEN.items() <= spec.env.items())  # the last ones compute: they import torch
        self._wanted.extend(spec.command for spec in ours)
        if ours:
            self._work.set()

    async def start(
        self, spec: ProcessSpec, command: Sequence[str], environment: Mapping[str, str], *, kept_open: Sequence[int]
    ) -> Child:
        """Fork a process, or start it if that is not possible.

        Args:
            spec: of the process.
            command: its command with addresses.
            environment: its whole environment.
            kept_open: our file descriptors that the child inherits.

        Raises:
            OSError: the command cannot be started.
        """
        forked = await self._fork(_Request(spec.command, command, environment, kept_open)) if spec.forked else None
        return forked or await Child.start(command, environment, kept_open=kept_open)

    async def _fork(self, request: _Request) -> Child | None:
        if not self._runs or not _may_be_forked(request.key):
            return None
        self._requests.append(request)
        self._work.set()
        with anyio.CancelScope(shield=True):  # the template answers within its limits, or is killed
            await request.answered.wait()
        return request.child

    async def run(self) -> None:
        """Run the template until cancelled, or until it fails."""
        self._runs = True
        try:
            await self._work.wait()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._note_output, self._start())
                    tasks.start_soon(self._note_end)
                    await self._serve()
            except* (_Failed, OSError) as errors:
                log.warning("template_failed", reason=str(flatten(errors)[0]), then="processes are started without it")
        finally:
            self._runs = False
            with anyio.CancelScope(shield=True):
                await self._end()
            for request in self._requests:
                request.answered.set()

    def _start(self) -> int:
        """Start the process; return the descriptor of its output."""
        self._conditions = _conditions()
        self._channel, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        output, write_end = os.pipe()
        try:
            with given:
                self._process = subprocess.Popen(  # not a process of asyncio: it is waited for with its group
                    [sys.executable, "-P", "-c", PROGRAM.format(given.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    env=self._environment,
                    pass_fds=[given.fileno()],
                    start_new_session=True,
                    preexec_fn=dying_with(os.getpid()),
                )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        self.guard.watch(self._process.pid)
        return output

    @property
    def _control(self) -> socket.socket:
        assert self._channel is not None
        return self._channel

    async def _serve(self) -> None:
        self._expect_ready(await self._answer(self._control))
        while True:
            ready = next((request for request in self._requests if request.key in self._prepared), None)
            if ready is not None:
                try:
                    ready.child = await self._forked(ready)
                finally:
                    self._requests.remove(ready)
                    ready.answered.set()
            elif self._wanted or self._requests:
                key = self._wanted.popleft() if self._wanted else self._requests[0].key
                if key not in self._prepared:
                    self._prepared[key] = await self._prepared_now(key)
            else:
                self._work = anyio.Event()
                await self._work.wait()

    async def _prepared_now(self, key: tuple[str, ...]) -> str:
        self._control.send(json.dumps(key).encode())
        answer = (await self._answer(self._control)).decode()
        if answer != READY:
            log.warning("not_forked", command=key[3:], reason=answer)
        return answer

    async def _forked(self, request: _Request) -> Child | None:
        if self._prepared[request.key] != READY or self._differs(request.environment):
            return None
        if not self._conditions or _conditions() != self._conditions:
            return None
        ours, theirs = socket.socketpair()
        output, write_end = os.pipe()
        try:
            ours.setblocking(False)
            with theirs, _adopting():
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
                theirs.close()
                answer = await self._answer(ours)
            if not answer.isdigit():
                raise _Failed(answer.decode())
            process = Forked(int(answer))
            try:
                await send_request(ours, request, write_end)
                self._expect_ready(await self._answer(ours))
            except BaseException:
                process.kill()
                with anyio.CancelScope(shield=True):
                    await process.wait()
                raise
            return Child(process, output)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
            ours.close()

    def _differs(self, environment: Mapping[str, str]) -> bool:
        """Whether an import would find other variables than the template has."""
        names = {name for name, _ in self._environment.items() ^ environment.items()}
        return any(name not in READ_LATE and not name.startswith(OWN_VARIABLES) for name in names)

    async def _answer(self, channel: socket.socket) -> bytes:
        """Return the next answer of the template, or of a process that it forked."""
        assert self._process is not None
        with anyio.move_on_after(self.limit_s):
            while True:
                with anyio.move_on_after(LOOK_S):
                    await anyio.wait_readable(channel)
                    if answer := channel.recv(MAX_ANSWER_BYTES):
                        return answer
                    raise _Failed("it ended")
                if _is_stopped(self._process.pid):
                    raise _Failed("it is stopped")
        raise _Failed(f"it gave no answer within {self.limit_s:g} s")

    def _expect_ready(self, answer: bytes) -> None:
        if answer.decode() != READY:
            raise _Failed(answer.decode())

    async def _note_end(self) -> None:
        assert self._process is not None
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        raise _Failed("it ended")

    async def _note_output(self, output: int) -> None:
        """Log what imports print."""
        try:
            while True:
                await anyio.wait_readable(output)
                if not (text := os.read(output, MAX_ANSWER_BYTES)):
                    return
                log.warning("template_output", text=text.decode(errors="replace"))
        finally:
            os.close(output)

    async def _end(self) -> None:
        """Kill the template and processes that it has not finished to fork, and wait for them."""
        if self._channel is not None:
            self._channel.close()
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.move_on_after(REAP_S), suppress(ChildProcessError):
            while True:
                if os.waitpid(-process.pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC222 - it does not block
                    await anyio.sleep(REAP_EVERY_S)
        process.returncode = -signal.SIGKILL  # it was waited for as a process of its group
        self.guard.forget(process.pid)


async def send_request(gate: socket.socket, request: _Request, output: int) -> None:
    """Send a request to the process that was forked for it: no secret passes through the template."""
    content = json.dumps([list(request.command), dict(request.environment), list(request.kept_open)]).encode()
    socket.send_fds(gate, [len(content).to_bytes(8)], [output, *request.kept_open])
    while content:
        await anyio.wait_writable(gate)
        content = content[gate.send(content) :]


@contextmanager
def _adopting() -> Generator[None]:
    """Become the parent of processes below this one whose parent ends; for a moment, since no others are waited for."""
    set_subreaper()
    try:
        yield
    finally:
        set_subreaper(is_one=False)


def _may_be_forked(command: Sequence[str]) -> bool:
    """Whether the interpreter and its options are those of the template."""
    return tuple(command[:3]) == (sys.executable, "-P", "-m")


def _conditions() -> tuple[object, ...]:
    """What a process inherits from this one besides its environment; empty: unknown."""
    own = Path("/proc/self")
    try:
        inherited = [line for line in (own / "status").read_text().splitlines() if line.startswith(INHERITED)]
        files = [(own / name).read_bytes() for name in ("limits", "oom_score_adj", "cgroup")]
        return (os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), inherited, files)
    except OSError:
        return ()


def _is_stopped(pid: int) -> bool:
    try:
        return stat_of(pid)[STATE] in STOPPED
    except OSError:
        return False
