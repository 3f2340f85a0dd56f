"""The programs of agents, between rollout actors and the process of their node that starts and holds them.

That process is the parent of all keepers. A rollout actor asks it to start and to stop programs, and gives it notes of
each session: what a successor needs to go on with it. If the actor dies, its programs and their notes are held, and
its successor gets them.
"""

from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from runtime.sessions.link import Connection, is_own, short_path

SOCKET_FILE: Final = "programs.sock"
AGAIN_S: Final = 0.1  # between two tries of an actor to connect
CONNECT_S: Final = 120.0  # for the process of programs to be there
KILL_S: Final = 10.0  # from SIGTERM to SIGKILL of a keeper
STOP_S: Final = 2 * KILL_S  # for a program to be stopped
LEAVE_S: Final = 3.0  # for all programs to be killed when their actor ends
NOT_HELD: Final = "the process that holds programs ended, and its programs with it"


class ActorHere(Struct, frozen=True, tag=True):
    """A rollout actor has connected."""

    actor: str  # its name, the same after its death
    born_ns: int  # on the clock of the machine; an earlier process of the same name is refused


class Start(Struct, frozen=True, tag=True):
    """A program is to be started.

    Args:
        session: its name, unique in the run.
        settings: of the keeper (`runtime.functions.keeper`).
        env: its environment.
        given: its input.
        secrets: words that its output is shown without.
        about: what a successor of the actor needs to know of the session.
    """

    session: str
    settings: dict[str, Any]
    env: dict[str, str]
    given: bytes
    secrets: tuple[str, ...]
    about: bytes


class Note(Struct, frozen=True, tag=True):
    """Something happened in a session: what is added to its notes, and the newest state in place of the one before."""

    session: str
    added: bytes
    state: bytes


class Stop(Struct, frozen=True, tag=True):
    """A program is to be killed, with all that it started, and forgotten."""

    session: str


class Leaving(Struct, frozen=True, tag=True):
    """The actor ends in order: its programs are to be killed. The connection ends once they are."""


class Held(Struct, frozen=True, tag=True):
    """A program whose actor has come back, with the notes of its session; None: they became too large to hold."""

    session: str
    about: bytes
    notes: tuple[bytes, ...] | None
    state: bytes


class Listed(Struct, frozen=True, tag=True):
    """All programs of the actor were named."""


class Over(Struct, frozen=True, tag=True):
    """A program has ended by itself.

    Args:
        session: of the program.
        code: of its exit; negative: the signal that killed it.
        output: the end of what it printed.
    """

    session: str
    code: int
    output: bytes


class Stopped(Struct, frozen=True, tag=True):
    """A program was killed, or there is none."""

    session: str


OfActor = ActorHere | Start | Note | Stop | Leaving
OfHolder = Held | Listed | Over | Stopped
OF_ACTOR: Final = msgspec.msgpack.Decoder(OfActor)
OF_HOLDER: Final = msgspec.msgpack.Decoder(OfHolder)


class _Program:
    """A program as its rollout actor knows it."""

    def __init__(self) -> None:
        self.over: Over | None = None
        self.ended, self.stopped = anyio.Event(), anyio.Event()

    def end(self, over: Over) -> None:
        self.over = self.over or over
        self.ended.set()


class Programs:
    """The rollout actor's end: starts and stops programs, and takes over those of an earlier process of its name.

    Args:
        run_dir: has the socket.
        actor: name of the actor, the same after its death.
    """

    def __init__(self, run_dir: Path, actor: str) -> None:
        self._run_dir, self._actor = run_dir, actor
        self._born_ns = monotonic_ns()
        self._connection: Connection | None = None
        self._connected = anyio.Event()
        self._programs: dict[str, _Program] = {}
        self._found: list[Held] = []
        self._listed = anyio.Event()

    async def run(self) -> None:
        """Connect, again whenever the process of programs is gone, and hear of programs.

        Never returns; a cancellation kills the programs.
        """
        while True:
            try:
                with short_path(self._run_dir, SOCKET_FILE) as path:
                    stream = await anyio.connect_unix(path)
            except OSError:  # it is not there: the node daemon starts it
                await anyio.sleep(AGAIN_S)
                continue
            async with stream:
                if is_own(stream):
                    connection = Connection(stream)
                    try:
                        await self._serve(connection)
                    except anyio.get_cancelled_exc_class():
                        await self._leave(connection)
                        raise
            self._connection, self._connected = None, anyio.Event()
            for session, program in self._programs.items():
                program.end(Over(session, -9, NOT_HELD.encode()))
                program.stopped.set()
            await anyio.sleep(AGAIN_S)

    async def _leave(self, connection: Connection) -> None:
        self._connection, self._connected = None, anyio.Event()
        with anyio.move_on_after(LEAVE_S, shield=True):
            if await connection.send(Leaving()):
                await connection.until_closed()
        for program in self._programs.values():
            program.stopped.set()

    async def found(self) -> Sequence[Held]:
        """Return the programs of an earlier process of this actor, once they are known."""
        await self._listed.wait()
        return self._found

    async def start(self, start: Start) -> None:
        """Start a program.

        Raises:
            TimeoutError: there is no process of programs.
        """
        with anyio.fail_after(CONNECT_S):
            while (connection := self._connection) is None:
                await self._connected.wait()
        program = self._programs[start.session] = _Program()
        if not await connection.send(start):
            program.end(Over(start.session, -9, NOT_HELD.encode()))

    async def note(self, session: str, added: bytes, state: bytes) -> None:
        """Add to the notes of a session. What was sent before this actor dies counts."""
        if session in self._programs and self._connection is not None:
            await self._connection.send(Note(session, added, state))

    async def ended(self, session: str) -> Over:
        """Return how a program ended, once it has."""
        program = self._programs[session]
        await program.ended.wait()
        assert program.over is not None
        return program.over

    async def stop(self, session: str) -> None:
        """Kill a program with all that it started, and forget it. Returns once that is done, or after STOP_S."""
        program = self._programs.get(session)
        if program is None:
            return
        if self._connection is not None and await self._connection.send(Stop(session)):
            with anyio.move_on_after(STOP_S):
                await program.stopped.wait()
        program.end(Over(session, 0, b""))
        self._programs.pop(session, None)

    async def _serve(self, connection: Connection) -> None:
        if is_first := not self._listed.is_set():
            self._found.clear()
            self._programs.clear()
        if not await connection.send(ActorHere(self._actor, self._born_ns)):
            return
        async for message in connection.messages(OF_HOLDER):
            match message:
                case Held(session) if is_first:
                    self._programs[session] = _Program()
                    self._found.append(message)
                case Held(session):  # of this process, which took it for ended when the connection broke
                    await connection.send(Stop(session))
                case Listed():
                    self._connection = connection
                    self._connected.set()
                    self._listed.set()
                case Over(session):
                    if (program := self._programs.get(session)) is not None:
                        program.end(message)
                case _:
                    assert isinstance(message, Stopped)
                    if (program := self._programs.get(message.session)) is not None:
                        program.stopped.set()


def masked(output: bytes, secrets: Sequence[str]) -> bytes:
    """Return what a program printed, without secrets."""
    for secret in secrets:
        output = output.replace(secret.encode(), b"***")
    return output
