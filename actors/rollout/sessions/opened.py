"""The sessions that a rollout actor has open: what the listener asks of them, and what an adapter learns of one."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from actors.rollout.samples.conversation import Conversation
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.session import Session
from runtime.sessions.actor_end import ActorEnd
from runtime.sessions.keys import KeyPair, SessionKeys
from runtime.sessions.link import ControlCall
from runtime.sessions.turns import ChatMessage, TurnAnswer, TurnRefused, TurnRequest
from runtime.util.rewards import reward_problem

LISTENER_S: Final = 120.0  # for the listener to say where it listens


@dataclass(eq=False)
class OpenSession:
    """A session while its agent runs.

    Attributes:
        keys: for its agent, and for the adapter.
        url: of the listener, without a path.
        reward: that was set; None: none, which is not 0.
        rewards: named ones beside it.
        turn_rewards: of its turns, in their order, where an environment gives some; None: that turn has none.
        is_truncated: whether its environment was cut off, and is not over.
        failure: why its environment says that it failed; empty: it did not.
        last: the newest message of the model.
        over: set once a holder of the control key ends the session or says that it failed.
    """

    keys: KeyPair
    url: str
    session: Session
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[float | None, ...] = ()
    is_truncated: bool = False
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
        self._end: ActorEnd | None = None

    def serve_by(self, end: ActorEnd) -> None:
        """Tell the listener of sessions by this end of its link."""
        self._end = end

    @asynccontextmanager
    async def opened(self, conversation: Conversation, name: str) -> AsyncGenerator[OpenSession]:
        """Open a session on a conversation that has not begun, until the end of the block; its keys end first.

        Args:
            conversation: of the sample.
            name: of the session, unique in the run.

        Raises:
            TimeoutError: the listener does not say where it listens.
        """
        assert self._end is not None
        with anyio.fail_after(LISTENER_S):
            url = await self._end.url()
        keys = KeyPair.new(name)
        async with Session(conversation, self._rendering) as session:
            opened = self._open[name] = OpenSession(keys, url, session)
            try:
                await self._end.opened(keys.digests())
                yield opened
            finally:
                await self.revoke(name)

    async def revoke(self, name: str) -> None:
        """End the keys of a session. Turns that are being sampled go on."""
        if self._open.pop(name, None) is not None and self._end is not None:
            with anyio.CancelScope(shield=True):
                await self._end.ended(name)

    def keys(self) -> Sequence[SessionKeys]:
        """Return those of the open sessions."""
        return [opened.keys.digests() for opened in self._open.values()]

    async def turn(self, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        """Sample a turn. Raises TurnRefused: it is not served."""
        opened = self._found(session)
        answer = await opened.session.turn(request, accepted)
        opened.last, opened.num_turns = answer.message, opened.num_turns + 1
        return answer

    async def count(self, session: str, request: TurnRequest) -> int:
        """Return the number of tokens of a prompt. Raises TurnRefused: it cannot be rendered."""
        return await self._found(session).session.count(request)

    async def control(self, session: str, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a holder of the control key. Raises TurnRefused: it is not allowed."""
        opened = self._found(session)
        match call:
            case "reward":
                self._set_reward(opened, content)
            case "fail":
                opened.failure = str(content["reason"])
                opened.over.set()
            case "end":
                opened.is_truncated = bool(content.get("truncated"))
                opened.over.set()
            case "show":
                pass
        return {"turns": opened.num_turns, "reward": opened.reward}

    def _set_reward(self, opened: OpenSession, content: Mapping[str, Any]) -> None:
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

    def _found(self, session: str) -> OpenSession:
        opened = self._open.get(session)
        if opened is None:
            raise TurnRefused("ended", "the session has ended")
        return opened
