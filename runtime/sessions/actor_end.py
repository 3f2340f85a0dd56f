"""The rollout actor's end of the link: says which sessions are open, and answers their calls."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
from anyio.abc import TaskGroup

from runtime.sessions.keys import SessionKeys
from runtime.sessions.link import (
    OF_LISTENER,
    Accepted,
    Answered,
    AskControl,
    AskCount,
    AskTurn,
    Connection,
    ControlCall,
    Ended,
    Hello,
    Listening,
    OfActor,
    Opened,
    Refused,
    Said,
    is_own,
    short_path,
)
from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest

AGAIN_S: Final = 0.1  # between two tries of an actor to connect
MAX_ANSWERS: Final = 16  # of a session that are kept for the same id


class Sessions(Protocol):
    """What a rollout actor has for its end of the link."""

    def keys(self) -> Sequence[SessionKeys]:
        """Return those of the open sessions."""
        ...

    async def turn(self, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        """Sample a turn.

        Args:
            session: whose turn it is.
            request: of the client.
            accepted: called once nothing of the request can be refused any more.

        Raises:
            TurnRefused: it is not served.
        """
        ...

    async def count(self, session: str, request: TurnRequest) -> int:
        """Return the number of tokens of a prompt.

        Raises:
            TurnRefused: it cannot be rendered.
        """
        ...

    async def control(self, session: str, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a call of a holder of the control key.

        Raises:
            TurnRefused: it is not allowed.
        """
        ...


class ActorEnd:
    """The rollout actor's end.

    Args:
        run_dir: has the socket.
        actor: name of the actor, the same after its death.
        model: as clients see it.
        max_tokens: of the model's context.
        sessions: answers calls.
    """

    def __init__(self, run_dir: Path, actor: str, model: str, max_tokens: int, sessions: Sessions) -> None:
        self._run_dir, self._sessions = run_dir, sessions
        self._actor, self._model, self._max_tokens = actor, model, max_tokens
        self._connection: Connection | None = None
        self._running: dict[str, bool] = {}  # ids of turns; whether each was accepted
        self._answers: dict[str, dict[str, Answered]] = {}  # by session and id, the oldest first
        self._url = ""
        self._has_url = anyio.Event()

    async def url(self) -> str:
        """Return where agents reach the listener, once it has said so. The caller sets a time limit."""
        await self._has_url.wait()
        return self._url

    async def opened(self, keys: SessionKeys) -> None:
        """Have the listener serve a session."""
        await self._send(Opened(keys))

    async def ended(self, session: str) -> None:
        """Have the listener refuse the keys of a session."""
        self._answers.pop(session, None)
        await self._send(Ended(session))

    async def run(self) -> None:
        """Connect, again whenever the listener is gone, and answer. Never returns; turns outlive a connection."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    with short_path(self._run_dir) as path:
                        stream = await anyio.connect_unix(path)
                except OSError:  # the listener is not there: the node daemon starts it
                    await anyio.sleep(AGAIN_S)
                    continue
                async with stream:
                    if is_own(stream):
                        await self._serve(Connection(stream), tasks)
                self._connection = None
                await anyio.sleep(AGAIN_S)

    async def _serve(self, connection: Connection, tasks: TaskGroup) -> None:
        keys = tuple(self._sessions.keys())
        self._connection = connection  # before the first await: what opens from here on is sent, maybe twice
        if not await connection.send(Hello(self._actor, self._model, self._max_tokens, keys)):
            return
        async for message in connection.messages(OF_LISTENER):
            match message:
                case Listening(url):
                    self._url = url
                    self._has_url.set()
                case AskTurn():
                    await self._ask_turn(message, tasks)
                case _:
                    tasks.start_soon(self._call, message)

    async def _send(self, message: OfActor) -> None:
        if self._connection is not None:  # else the next Hello says it, or the listener asks again
            await self._connection.send(message)

    async def _ask_turn(self, asked: AskTurn, tasks: TaskGroup) -> None:
        answer = self._answers.get(asked.session, {}).get(asked.id)
        if answer is not None:
            await self._send(answer)
        elif asked.id not in self._running:
            self._running[asked.id] = False
            tasks.start_soon(self._turn, asked, tasks)
        elif self._running[asked.id]:
            await self._send(Accepted(asked.id))

    async def _turn(self, asked: AskTurn, tasks: TaskGroup) -> None:
        def accepted() -> None:
            self._running[asked.id] = True
            tasks.start_soon(self._send, Accepted(asked.id))

        try:
            answer = Answered(asked.id, await self._sessions.turn(asked.session, asked.request, accepted))
        except TurnRefused as refused:
            await self._send(_refusal(asked.id, refused))
        else:
            answers = self._answers.setdefault(asked.session, {})
            if len(answers) >= MAX_ANSWERS:
                answers.pop(next(iter(answers)))
            answers[asked.id] = answer
            await self._send(answer)
        finally:
            del self._running[asked.id]

    async def _call(self, asked: AskCount | AskControl) -> None:
        try:
            if isinstance(asked, AskCount):
                content: Mapping[str, Any] = {"num_tokens": await self._sessions.count(asked.session, asked.request)}
            else:
                content = await self._sessions.control(asked.session, asked.call, asked.content)
        except TurnRefused as refused:
            await self._send(_refusal(asked.id, refused))
        else:
            await self._send(Said(asked.id, dict(content)))


def _refusal(number: str, refused: TurnRefused) -> Refused:
    return Refused(number, refused.kind, refused.reason, refused.num_tokens, refused.max_tokens)
