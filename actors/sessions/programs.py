"""Process of the programs of agents: starts them under keepers, and holds them while their rollout actor is away.

It runs until SIGTERM. If it dies, the kernel signals its keepers, which kill all programs.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import anyio
import msgspec
from anyio.abc import Process, SocketStream, TaskGroup
from msgspec import Meta, Struct

from runtime.functions.frames import FrameError
from runtime.functions.limits import keeper_command
from runtime.process.heartbeat import pulsing
from runtime.process.main import RUN_DIR, spare_the_collector
from runtime.sessions.link import HOLD_S, Connection, bound, is_own
from runtime.sessions.programs import (
    KILL_S,
    OF_ACTOR,
    SOCKET_FILE,
    ActorHere,
    Held,
    Leaving,
    Listed,
    Note,
    OfHolder,
    Over,
    Start,
    Stop,
    Stopped,
    masked,
)
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK

TAIL_BYTES: Final = 2_000  # of a program's output that are kept
MAX_NOTES_BYTES: Final = 32 << 20  # of a session; with more it is not taken over
CODE_NOT_STARTED: Final = 126  # as shells say it

log = logging.getLogger("programs")


class HolderSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the process.

    Args:
        hold_s: time for which programs of a rollout actor that is away are held, in seconds.
    """

    hold_s: Annotated[float, Meta(gt=0)] = HOLD_S


class _Held:
    """A program that runs, or has ended and was not stopped yet."""

    def __init__(self, actor: str, start: Start) -> None:
        self.actor, self.session, self.about, self.secrets = actor, start.session, start.about, start.secrets
        self.notes: list[bytes] | None = []
        self.num_bytes = 0
        self.state = b""
        self.over: Over | None = None
        self.scope = anyio.CancelScope()
        self.gone = anyio.Event()

    def add(self, note: Note) -> None:
        self.state = note.state
        self.num_bytes += len(note.added)
        if self.num_bytes > MAX_NOTES_BYTES:
            self.notes = None
        if self.notes is not None:
            self.notes.append(note.added)


class ProgramHolder:
    """Starts, holds and kills programs.

    Args:
        run_dir: gets the socket.
        hold_s: time for which programs of a rollout actor that is away are held, in seconds.
    """

    def __init__(self, run_dir: Path, *, hold_s: float) -> None:
        self._run_dir, self._hold_s = run_dir, hold_s
        self._actors: dict[str, Connection] = {}  # that are here
        self._born_ns: dict[str, int] = {}  # of the newest process of each name
        self._held: dict[str, _Held] = {}  # by session
        self._tasks: TaskGroup | None = None

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Accept connections of rollout actors. Never returns; a cancellation kills all programs."""
        async with bound(self._run_dir, SOCKET_FILE) as listener, anyio.create_task_group() as self._tasks:
            task_status.started()
            await listener.serve(self._serve_one, self._tasks)

    async def _serve_one(self, stream: SocketStream) -> None:
        async with stream:
            if not is_own(stream):
                return
            connection, actor = Connection(stream), ""
            try:
                async for message in connection.messages(OF_ACTOR):
                    if isinstance(message, ActorHere):
                        if message.born_ns < self._born_ns.get(message.actor, 0):
                            return  # it was replaced
                        actor = message.actor
                        await self._greet(message, connection)
                    elif isinstance(message, Leaving):
                        await self._kill_those_of(actor)
                        return
                    elif self._actors.get(actor) is connection:
                        self._hear(message, actor)
            except (FrameError, msgspec.DecodeError):  # no such actor: a process of this user that speaks otherwise
                return
            finally:
                if self._actors.get(actor) is connection:
                    del self._actors[actor]
                    assert self._tasks is not None
                    self._tasks.start_soon(self._let_go, actor, self._born_ns[actor])

    async def _greet(self, here: ActorHere, connection: Connection) -> None:
        self._actors[here.actor], self._born_ns[here.actor] = connection, here.born_ns
        for held in self._of(here.actor):
            if held.scope.cancel_called:  # it is being stopped
                continue
            notes = None if held.notes is None else tuple(held.notes)
            await connection.send(Held(held.session, held.about, notes, held.state))
            if held.over is not None:
                await connection.send(held.over)
        await connection.send(Listed())

    async def _let_go(self, actor: str, born_ns: int) -> None:
        """Kill the programs of an actor that does not come back."""
        await anyio.sleep(self._hold_s)
        if actor not in self._actors and self._born_ns[actor] == born_ns:
            log.warning("%s did not come back within %g s: its programs end", actor, self._hold_s)
            await self._kill_those_of(actor)

    async def _kill_those_of(self, actor: str) -> None:
        async with anyio.create_task_group() as tasks:
            for held in self._of(actor):
                tasks.start_soon(self._stop, held)

    def _of(self, actor: str) -> list[_Held]:
        return [held for held in self._held.values() if held.actor == actor]

    def _hear(self, message: Start | Note | Stop, actor: str) -> None:
        assert self._tasks is not None
        match message:
            case Start(session):
                if session not in self._held:
                    held = self._held[session] = _Held(actor, message)
                    self._tasks.start_soon(self._run, held, message)
            case Note(session):
                if session in self._held:
                    self._held[session].add(message)
            case Stop(session):
                self._tasks.start_soon(self._answer_stop, session, actor)

    async def _answer_stop(self, session: str, actor: str) -> None:
        if (held := self._held.get(session)) is not None:
            await self._stop(held)
        await self._tell(actor, Stopped(session))

    async def _stop(self, held: _Held) -> None:
        held.scope.cancel()
        await held.gone.wait()
        self._held.pop(held.session, None)

    async def _tell(self, actor: str, message: OfHolder) -> None:
        if (connection := self._actors.get(actor)) is not None:
            await connection.send(message)

    async def _run(self, held: _Held, start: Start) -> None:
        """Run a program to its end, or until it is stopped."""
        try:
            with held.scope:
                code, output = await _ended(start)
                held.over = Over(held.session, code, masked(output, held.secrets))
        finally:
            held.gone.set()
        if held.over is not None:
            await self._tell(held.actor, held.over)


async def _ended(start: Start) -> tuple[int, bytes]:
    """Run a program; return its exit code and the end of what it printed. A cancellation kills all that it started."""
    try:
        process = await anyio.open_process(
            keeper_command(start.settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=start.env,
            start_new_session=True,
        )
    except OSError as error:
        return CODE_NOT_STARTED, f"it was not started: {error}".encode()
    output = bytearray()
    async with _killed_at_end(process):
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(anyio.BrokenResourceError):  # it has ended
            await process.stdin.send(start.given)
        await process.stdin.aclose()
        with suppress(anyio.EndOfStream):
            while True:
                output += await process.stdout.receive()
                del output[:-TAIL_BYTES]
        return await process.wait(), bytes(output)


@asynccontextmanager
async def _killed_at_end(process: Process) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)  # the keeper kills the group, and daemons too
            with anyio.move_on_after(KILL_S):
                await process.wait()
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


@asynccontextmanager
async def holding(run_dir: Path, settings: HolderSettings) -> AsyncGenerator[None]:
    """Hold programs of the run for the duration of a block, whose end kills them."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(ProgramHolder(run_dir, hold_s=settings.hold_s).serve)
        yield
        tasks.cancel_scope.cancel()


async def _serve(run_dir: Path, settings: HolderSettings) -> None:
    async with pulsing(), holding(run_dir, settings):
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break


def main(arguments: Sequence[str]) -> int:
    """Hold programs of the run in PHYSARUM_RUN_DIR with the settings in the first argument, as JSON."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    spare_the_collector()
    try:
        settings = msgspec.json.decode(arguments[0], type=HolderSettings)
    except msgspec.DecodeError as error:
        log.error("settings of the process of programs: %s", error)
        return EXIT_INPUT_ERROR
    anyio.run(_serve, Path(os.environ[RUN_DIR]), settings)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
