"""The link between the listener for agents and the rollout actors of its node: a Unix socket in the run's directory.

The listener binds it; each rollout actor connects, says which sessions it has open, and answers their turns. Both ends
may die. The listener sends what is not answered again once the actor of a session is back, under the same id; an
actor joins an id that it knows to its running turn, or repeats the answer.
"""

import os
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import msgspec
from anyio.abc import SocketStream
from msgspec import Struct

from runtime.functions.frames import FrameBuffer, framed
from runtime.sessions.keys import SessionKeys
from runtime.sessions.turns import RefusalKind, TurnAnswer, TurnRequest

SOCKET_FILE: Final = "sessions.sock"
MAX_FRAME_BYTES: Final = 64 << 20  # a body of 16 MiB, with room for what its text becomes
HOLD_S: Final = 600.0  # for a rollout actor that is away: calls wait, and programs go on
SEND_S: Final = 30.0  # for the other end to take a frame
READ_BYTES: Final = 1 << 16

ControlCall = Literal["show", "reward", "end", "fail"]


class Hello(Struct, frozen=True, tag=True):
    """An actor has connected. Sessions of it that are not named here have ended."""

    actor: str
    model: str
    max_tokens: int  # of the model's context
    sessions: tuple[SessionKeys, ...]


class Opened(Struct, frozen=True, tag=True):
    """A session has begun, or came from another actor."""

    keys: SessionKeys


class Ended(Struct, frozen=True, tag=True):
    """A session has ended, and its keys with it."""

    session: str


class Accepted(Struct, frozen=True, tag=True):
    """A turn is served: its prompt was found to fit."""

    id: str


class Answered(Struct, frozen=True, tag=True):
    """A turn was sampled."""

    id: str
    answer: TurnAnswer


class Refused(Struct, frozen=True, tag=True):
    """A call was refused."""

    id: str
    kind: RefusalKind
    reason: str
    num_tokens: int = 0
    max_tokens: int = 0


class Said(Struct, frozen=True, tag=True):
    """The result of a control call or of a count."""

    id: str
    content: dict[str, Any]


class Listening(Struct, frozen=True, tag=True):
    """Where agents reach the listener."""

    url: str


class AskTurn(Struct, frozen=True, tag=True):
    """The listener wants a turn."""

    id: str
    session: str
    request: TurnRequest


class AskCount(Struct, frozen=True, tag=True):
    """The listener wants to know how many tokens a prompt has."""

    id: str
    session: str
    request: TurnRequest


class AskControl(Struct, frozen=True, tag=True):
    """A holder of the control key calls for something."""

    id: str
    session: str
    call: ControlCall
    content: dict[str, Any]


Ask = AskTurn | AskCount | AskControl
OfActor = Hello | Opened | Ended | Accepted | Answered | Refused | Said
OfListener = Listening | AskTurn | AskCount | AskControl
_ENCODER: Final = msgspec.msgpack.Encoder()
OF_ACTOR: Final = msgspec.msgpack.Decoder(OfActor)
OF_LISTENER: Final = msgspec.msgpack.Decoder(OfListener)


class Unavailable(Exception):
    """A call had no answer in its time; the text names the process that did not give it."""


class Connection:
    """Frames over one connection."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._sending = anyio.Lock()

    async def send(self, message: Struct) -> bool:
        """Send a message; return False if the other end is gone."""
        frame = framed(_ENCODER.encode(message), MAX_FRAME_BYTES)
        try:
            with anyio.fail_after(SEND_S):
                async with self._sending:
                    await self._stream.send(frame)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError):
            await anyio.aclose_forcefully(self._stream)  # a part of a frame may be sent
            return False
        return True

    async def until_closed(self) -> None:
        """Wait until the other end is gone; what it still sends is dropped."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await self._stream.receive(READ_BYTES)

    async def messages(self, decoder: msgspec.msgpack.Decoder[Any]) -> AsyncIterator[Any]:
        """Yield messages until the other end is gone."""
        frames = FrameBuffer(MAX_FRAME_BYTES)
        while True:
            while (frame := frames.next_frame()) is not None:
                yield decoder.decode(frame)
            try:
                frames.feed(await self._stream.receive(READ_BYTES))
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


@contextmanager
def short_path(run_dir: Path, file: str = SOCKET_FILE) -> Generator[str]:
    """Yield a path of a socket that is short enough for its address, whatever the directory's is."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{file}"
    finally:
        os.close(directory)


def is_own(stream: SocketStream) -> bool:
    """Whether the process at the other end has the user of this one."""
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    given = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", given)[1] == os.geteuid()


@asynccontextmanager
async def bound(run_dir: Path, file: str = SOCKET_FILE) -> AsyncGenerator[anyio.abc.Listener[SocketStream]]:
    """Listen at a socket, which its user alone can reach."""
    with short_path(run_dir, file) as path:
        listener = await anyio.create_unix_listener(path, mode=0o600)
    async with listener:
        yield listener
