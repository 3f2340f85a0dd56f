"""Sessions with scripted answers behind the link, in place of a rollout actor."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from runtime.sessions.actor_end import ActorEnd
from runtime.sessions.keys import KeyPair, SessionKeys
from runtime.sessions.link import ControlCall
from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest
from tests.build.turns import answer

Script = Callable[[TurnRequest], TurnAnswer | TurnRefused]


def echo(request: TurnRequest) -> TurnAnswer:
    """Answer with the text of the last message."""
    return answer(request.messages[-1].text if request.messages else "ids")


class ScriptedSessions:
    """Answers turns by a script, at once or once `go` is set."""

    def __init__(self, *sessions: str, script: Script = echo) -> None:
        self.pairs = {name: KeyPair.new(name) for name in sessions}
        self.script = script
        self.scripts: dict[str, Script] = {}  # of single sessions
        self.slow: dict[str, float] = {}  # seconds that a turn takes after it was accepted, by session
        self.ended: Sequence[str] = ()  # sessions that end at once
        self.go = anyio.Event()
        self.go.set()
        self.accepts = True  # before it waits
        self.turns: list[tuple[str, TurnRequest]] = []
        self.calls: list[tuple[str, str, Mapping[str, Any]]] = []
        self.changed = anyio.Event()
        self.end: ActorEnd | None = None

    def keys(self) -> Sequence[SessionKeys]:
        """Return those of the open sessions."""
        return [pair.digests() for pair in self.pairs.values()]

    async def turn(self, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        """Answer by the script."""
        self.turns.append((session, request))
        self._notify()
        scripted = self.scripts.get(session, self.script)(request)
        if self.accepts and (session in self.slow or isinstance(scripted, TurnAnswer)):
            accepted()
        await anyio.sleep(self.slow.get(session, 0))
        if isinstance(scripted, TurnRefused):
            raise scripted
        await self.go.wait()
        return scripted

    async def count(self, session: str, request: TurnRequest) -> int:
        """Return the number of words."""
        return sum(len(message.text.split()) for message in request.messages)

    async def control(self, session: str, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Note a call; end the session if that is wanted."""
        self.calls.append((session, call, content))
        self._notify()
        if call in ("end", "fail") and self.end is not None:
            del self.pairs[session]
            await self.end.ended(session)
        return {"num_turns": len(self.turns)} if call == "show" else {}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which a turn or a call may change."""
        while not holds():
            await self.changed.wait()

    def _notify(self) -> None:
        before, self.changed = self.changed, anyio.Event()
        before.set()


@asynccontextmanager
async def connected(run_dir: Path, sessions: ScriptedSessions, actor: str = "rollout") -> AsyncIterator[ActorEnd]:
    """Connect scripted sessions for the duration of a block, which ends as by the death of their actor."""
    sessions.end = ActorEnd(run_dir, actor, "m", 4096, sessions)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sessions.end.run)
        with anyio.fail_after(200):
            await sessions.end.url()
        for session in sessions.ended:
            await sessions.end.ended(session)
        yield sessions.end
        tasks.cancel_scope.cancel()
