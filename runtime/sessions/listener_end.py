"""The listener's end of the link: knows the keys of open sessions, and waits for rollout actors that are away."""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import SocketStream, TaskStatus

from runtime.functions.frames import FrameError
from runtime.sessions.keys import SessionKeys, Use, session_of
from runtime.sessions.link import (
    OF_ACTOR,
    Accepted,
    Answered,
    Ask,
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
    Unavailable,
    bound,
    is_own,
)
from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest

MAX_ENDED: Final = 65_536  # names of ended sessions, whose keys get another status than unknown ones


def _end_of(ask: Ask) -> Refused | Said:
    """Return the outcome of a call whose session has ended: of a call that ends it, that is what was wanted."""
    if isinstance(ask, AskControl) and ask.call in ("end", "fail"):
        return Said(ask.id, {})
    return Refused(ask.id, "ended", "The session of this key has ended.")


class _Known:
    """A session as the listener knows it."""

    def __init__(self, keys: SessionKeys, actor: str) -> None:
        self.keys, self.actor = keys, actor


class _Waiting:
    """A call without an answer yet."""

    def __init__(self, ask: Ask, accepted: Callable[[], None]) -> None:
        self.ask, self.accepted = ask, accepted
        self.done = anyio.Event()
        self.outcome: Answered | Refused | Said | None = None

    def end(self, outcome: Answered | Refused | Said) -> None:
        self.outcome = outcome
        self.done.set()


class ListenerEnd:
    """The listener's end.

    Args:
        run_dir: gets the socket.
        hold_s: time for which a call waits for a rollout actor that is away, in seconds.
        turn_s: time for a whole call, in seconds.
        num_actors: rollout actors that will connect. Before all have, an unknown key is no wrong one.
    """

    def __init__(self, run_dir: Path, *, hold_s: float, turn_s: float, num_actors: int = 1) -> None:
        self._run_dir, self._hold_s, self._turn_s = run_dir, hold_s, turn_s
        self._num_actors = num_actors
        self._actors: dict[str, Connection | None] = {}
        self._away_since: dict[str, float] = {}  # by actor
        self._began = anyio.current_time()
        self._all_came = anyio.Event()
        self._known: dict[str, _Known] = {}
        self._ended: dict[str, None] = {}  # the oldest first
        self._waiting: dict[str, _Waiting] = {}
        self.on_end: Callable[[str], None] = lambda session: None
        self.model, self.max_tokens = "", 0
        self.url = ""  # where agents reach the listener; set before `serve`

    @property
    def num_waiting(self) -> int:
        """Calls without an answer."""
        return len(self._waiting)

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Accept connections of rollout actors. Never returns; `url` is set before."""
        async with bound(self._run_dir) as listener, anyio.create_task_group() as tasks:
            task_status.started()
            await listener.serve(self._serve_one, tasks)

    async def find(self, key: str) -> tuple[str, Use]:
        """Return the session that a key is for, and what it may do.

        Raises:
            TurnRefused: no session has it, or the session has ended.
        """
        session = session_of(key)
        if session is not None and session not in self._known and session not in self._ended:
            with anyio.move_on_after(self._hold_s):  # after a start of the listener
                await self._all_came.wait()
        known = self._known.get(session or "")
        use = None if known is None else known.keys.use_of(key)
        if session is not None and use is not None:
            return session, use
        if session in self._ended:
            raise TurnRefused("ended", "The session of this key has ended.")
        raise TurnRefused("unknown_key", "No session of this run has this key.")

    async def turn(self, number: str, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        """Have a turn sampled.

        Args:
            number: id of the turn, unique in the run and the same for the same request.
            session: whose turn it is.
            request: of the client.
            accepted: called once it is served; more than once if an actor dies.

        Raises:
            TurnRefused: it is not served.
            Unavailable: no rollout actor answered in time.
        """
        answered = await self._answer(AskTurn(number, session, request), accepted)
        assert isinstance(answered, Answered)
        return answered.answer

    async def count(self, number: str, session: str, request: TurnRequest) -> int:
        """Return the number of tokens of a prompt. Raises as `turn` does."""
        said = await self._answer(AskCount(number, session, request))
        assert isinstance(said, Said)
        return said.content["num_tokens"]

    async def control(
        self, number: str, session: str, call: ControlCall, content: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Make a control call. Raises as `turn` does."""
        said = await self._answer(AskControl(number, session, call, dict(content)))
        assert isinstance(said, Said)
        return said.content

    async def _answer(self, ask: Ask, accepted: Callable[[], None] = lambda: None) -> Answered | Said:
        waiting = self._waiting[ask.id] = _Waiting(ask, accepted)
        try:
            known = self._known.get(ask.session)
            if known is None:
                raise TurnRefused("ended", "The session of this key has ended.")
            connection = self._actors[known.actor]
            if connection is not None:
                await connection.send(ask)
            await self._wait(waiting)
        finally:
            del self._waiting[ask.id]
        outcome = waiting.outcome
        if isinstance(outcome, Refused):
            raise TurnRefused(outcome.kind, outcome.reason, outcome.num_tokens, outcome.max_tokens)
        assert outcome is not None
        return outcome

    async def _wait(self, waiting: _Waiting) -> None:
        """Wait until a call has its outcome, which is the end of its session too."""
        until, session = anyio.current_time() + self._turn_s, waiting.ask.session
        while not waiting.done.is_set():
            actor, now = self._known[session].actor, anyio.current_time()
            held_until = min(self._away_since.get(actor, inf), now) + self._hold_s
            if now >= min(until, held_until):
                limit = f"{self._hold_s:g} s (hold_s)" if now < until else f"{self._turn_s:g} s (turn_s)"
                raise Unavailable(f"{actor} did not answer for session {session} within {limit}.")
            with anyio.move_on_after(min(until, held_until) - now):
                await waiting.done.wait()

    async def _serve_one(self, stream: SocketStream) -> None:
        async with stream:
            if not is_own(stream):
                return
            connection, actor = Connection(stream), ""
            try:
                await connection.send(Listening(self.url))
                async for message in connection.messages(OF_ACTOR):
                    if isinstance(message, Hello):
                        actor = message.actor
                        await self._greet(message, connection)
                    else:
                        self._hear(message, actor)
            except (FrameError, msgspec.DecodeError):  # no such actor: a process of this user that speaks otherwise
                return
            finally:
                if actor and self._actors.get(actor) is connection:
                    self._actors[actor] = None
                    self._away_since[actor] = anyio.current_time()

    async def _greet(self, hello: Hello, connection: Connection) -> None:
        actor = hello.actor
        self._actors[actor] = connection
        self._away_since.pop(actor, None)
        self.model, self.max_tokens = hello.model, hello.max_tokens
        named = {keys.session for keys in hello.sessions}
        for session in [name for name, known in self._known.items() if known.actor == actor and name not in named]:
            self._end(session)
        for keys in hello.sessions:
            self._open(keys, actor)
        if len(self._actors) >= self._num_actors:
            self._all_came.set()
        for waiting in list(self._waiting.values()):
            if waiting.ask.session in named:
                await connection.send(waiting.ask)

    def _open(self, keys: SessionKeys, actor: str) -> None:
        self._ended.pop(keys.session, None)
        self._known[keys.session] = _Known(keys, actor)

    def _end(self, session: str) -> None:
        if self._known.pop(session, None) is None:
            return
        self._ended[session] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.pop(next(iter(self._ended)))
        for waiting in list(self._waiting.values()):
            if waiting.ask.session == session:
                waiting.end(_end_of(waiting.ask))
        self.on_end(session)

    def _hear(self, message: OfActor, actor: str) -> None:
        match message:
            case Opened(keys):
                self._open(keys, actor)
            case Ended(session):
                self._end(session)
            case Accepted(number):
                if number in self._waiting:
                    self._waiting[number].accepted()
            case Answered() | Refused() | Said():
                if message.id in self._waiting:
                    self._waiting[message.id].end(message)
            case Hello():
                raise AssertionError("a greeting is not heard here")
