"""The sessions that a rollout actor has open: what the listener asks of them, and what an adapter learns of one."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from actors.rollout.samples.conversation import Conversation
from actors.rollout.sessions.notes import ControlNote, LeftSession, TurnNote
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.session import Session
from runtime.sessions.actor_end import ActorEnd
from runtime.sessions.keys import SessionKeys
from runtime.sessions.link import ControlCall
from runtime.sessions.turns import ChatMessage, TurnAnswer, TurnRefused, TurnRequest
from runtime.util.rewards import reward_problem

Keep = Callable[[TurnNote | ControlNote], Awaitable[None]]
LISTENER_S: Final = 120.0  # for the listener to say where it listens


@dataclass(eq=False)
class OpenSession:
    """A session while its agent runs.

    Attributes:
        keys: digests of those of its agent and of the adapter.
        url: of the listener, without a path.
        keep: keeps notes for the successor of this actor.
        reward: that was set; None: none, which is not 0.
        rewards: named ones beside it.
        turn_rewards: of its turns, in their order, where an environment gives some; None: that turn has none.
        is_truncated: whether its environment was cut off, and is not over.
        problem: why a session that was left cannot go on; empty: it can, or began here.
        failure: why its environment says that it failed; empty: it did not.
        last: the newest message of the model.
        over: set once a holder of the control key ends the session or says that it failed.
    """

    keys: SessionKeys
    url: str
    session: Session
    keep: Keep
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[float | None, ...] = ()
    is_truncated: bool = False
    problem: str = ""
    failure: str = ""
    last: ChatMessage | None = None
    num_turns: int = 0
    over: anyio.Event = field(default_factory=anyio.Event)


class OpenSessions:
    """The open sessions of a rollout actor, by name; the actor's end of the link calls them.

    Args:
        rendering: of the served model.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._open: dict[str, OpenSession] = {}
        self._expected: dict[str, tuple[SessionKeys, anyio.Event]] = {}  # left by an earlier process, not open yet
        self._end: ActorEnd | None = None

    def serve_by(self, end: ActorEnd) -> None:
        """Tell the listener of sessions by this end of its link."""
        self._end = end

    def expect(self, keys: SessionKeys) -> None:
        """Hold the requests of a session that an earlier process left, until it is opened or revoked."""
        self._expected[keys.session] = keys, anyio.Event()

    @asynccontextmanager
    async def opened(
        self, conversation: Conversation, keys: SessionKeys, keep: Keep, left: LeftSession | None = None
    ) -> AsyncGenerator[OpenSession]:
        """Open a session on a conversation that has not begun, until the end of the block; its keys end first.

        Args:
            conversation: of the sample.
            keys: digests of its keys, with the name of the session, unique in the run.
            keep: keeps notes for the successor of this actor.
            left: by an earlier process, which the session goes on with.

        Raises:
            TimeoutError: the listener does not say where it listens.
        """
        assert self._end is not None
        with anyio.fail_after(LISTENER_S):
            url = await self._end.url()
        name = keys.session
        async with Session(conversation, self._rendering, keep=keep) as session:
            opened = OpenSession(keys, url, session, keep)
            try:
                if left is not None:
                    await self._restore(opened, left)
                self._open[name] = opened
                await self._end.opened(keys)
                if not opened.problem:
                    self._let_in(name)
                yield opened
            finally:
                await self.revoke(name)

    async def _restore(self, opened: OpenSession, left: LeftSession) -> None:
        turns = left.turns
        try:
            await opened.session.restore(turns)
        except ValueError as error:
            opened.problem = f"its rollout actor ended, and its session cannot go on: {error}"
            return
        opened.num_turns, opened.last = len(turns), turns[-1].message if turns else None
        for note in left.notes or ():
            if isinstance(note, ControlNote):
                _apply(opened, note.call, note.content)

    async def revoke(self, name: str) -> None:
        """End the keys of a session. Turns that are being sampled go on."""
        is_known = self._open.pop(name, None) is not None or name in self._expected
        self._let_in(name)
        if is_known and self._end is not None:
            with anyio.CancelScope(shield=True):
                await self._end.ended(name)

    def _let_in(self, name: str) -> None:
        """Let the requests of a session that was left be answered."""
        _, is_settled = self._expected.pop(name, (None, None))
        if is_settled is not None:
            is_settled.set()

    def keys(self) -> Sequence[SessionKeys]:
        """Return those of the open sessions, and of those that are expected."""
        return [*(opened.keys for opened in self._open.values()), *(keys for keys, _ in self._expected.values())]

    async def turn(self, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        """Sample a turn. Raises TurnRefused: it is not served."""
        opened = await self._found(session)
        answer = await opened.session.turn(request, accepted)
        opened.last, opened.num_turns = answer.message, opened.num_turns + 1
        return answer

    async def count(self, session: str, request: TurnRequest) -> int:
        """Return the number of tokens of a prompt. Raises TurnRefused: it cannot be rendered."""
        return await (await self._found(session)).session.count(request)

    async def control(self, session: str, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a holder of the control key. Raises TurnRefused: it is not allowed."""
        opened = await self._found(session)
        _apply(opened, call, content)
        if call != "show":
            await opened.keep(ControlNote(call, dict(content)))
        return {"turns": opened.num_turns, "reward": opened.reward}

    async def _found(self, session: str) -> OpenSession:
        if session in self._expected:
            await self._expected[session][1].wait()
        opened = self._open.get(session)
        if opened is None:
            raise TurnRefused("ended", "the session has ended")
        return opened


def _apply(opened: OpenSession, call: ControlCall, content: Mapping[str, Any]) -> None:
    """Do what a holder of the control key wants. Raises TurnRefused: it is not allowed."""
    match call:
        case "reward":
            _set_reward(opened, content)
        case "fail":
            opened.failure = str(content["reason"])
            opened.over.set()
        case "end":
            opened.is_truncated = bool(content.get("truncated"))
            opened.over.set()
        case "show":
            pass


def _set_reward(opened: OpenSession, content: Mapping[str, Any]) -> None:
    if content.get("answer") is not None:
        raise TurnRefused("parameter", "answer: rewards of single answers are not implemented yet")
    reward, named = content.get("reward"), dict(content.get("rewards") or {})
    turns = tuple(content.get("turns") or ())
    for value in [] if reward is None else [reward, *named.values(), *(turn for turn in turns if turn is not None)]:
        if (problem := reward_problem(value)) is not None:
            raise TurnRefused("parameter", f"reward = {value}: {problem}")
    if reward is None and named:
        raise TurnRefused("parameter", "rewards without a reward: set both")
    if len(turns) > opened.num_turns:
        raise TurnRefused("parameter", f"turns has {len(turns)} rewards: the session has {opened.num_turns} turns")
    opened.reward, opened.rewards, opened.turn_rewards = reward, named, turns
