"""Weight sessions as a rollout actor takes part in them: who of its engines does, and each one's part. No IO.

The trainer leads by calls; each engine's own task does what they ask. A call is answered when all engines that it
concerns have done so or cannot. One session is open at a time: another one, or a later trainer, closes it.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol

import anyio
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from messages import (
    BucketSent,
    EngineLayout,
    EnginesAnswered,
    GroupsOffered,
    MembersGiven,
    SessionClosed,
    SessionFinished,
    SessionMember,
    SessionOffered,
    SessionPrepared,
)

log = structlog.get_logger()

GATHER_S: Final = 5.0  # for engines that are to take part and are not ready for it yet; those go without
Step = SessionPrepared | GroupsOffered | BucketSent | SessionFinished


class Goal(Protocol):
    """What the engines of a rollout actor are to take."""

    @property
    def version(self) -> int:
        """The newest version that they are to take."""
        ...

    async def reached(self, version: int) -> None:
        """Wait until that version, or a newer one, is what they are to take."""
        ...

    async def notify(self) -> None:
        """Let the waiting look again."""
        ...


class SessionOver(EngineUnavailable):
    """A session has ended before an engine held the version. It may hold a part of it."""


class Place(NamedTuple):
    """How an engine takes part in a session."""

    num_ranks: int  # that get weights, each its share
    is_compared: bool  # its checksums will be asked
    wants: EngineLayout | None  # they can be reckoned


class _Asked:
    """A step that an engine is to do."""

    def __init__(self, step: Step | SessionClosed) -> None:
        self.step = step
        self.error = ""
        self.done = anyio.Event()

    def answer(self, error: str = "") -> None:
        self.error = self.error or error
        self.done.set()


class Part:
    """One engine's part in a session: its own task takes the steps one by one and says what became of them."""

    def __init__(self, engine: str, key: str, place: Place, version: int) -> None:
        self.engine = engine
        self.key = key
        self.place = place
        self.version = version
        self.came: dict[str, str] = {}  # in which bucket each tensor came
        self.session = ""  # once it is a member
        self.holds = False  # what the session brought
        self.over = anyio.Event()  # the session was closed
        self._deadline_s = 0.0
        self._failure = ""
        self._queue: list[_Asked] = []
        self._current: _Asked | None = None
        self._changed = anyio.Event()

    def enter(self, session: str, deadline_s: float) -> SessionMember:
        """Become a member of a session."""
        self.session, self._deadline_s = session, deadline_s
        return SessionMember(engine=self.engine, key=self.key, **self.place._asdict())

    async def ask(self, step: Step) -> str:
        """Have the engine do a step; why it did not, or nothing. The last one may be asked for again."""
        if self.holds and isinstance(step, SessionFinished):
            return ""
        if self._failure:
            return self._failure
        asked = _Asked(step)
        self._queue.append(asked)
        self._changed.set()
        await asked.done.wait()
        return asked.error

    async def next(self) -> Step:
        """The next step, once the one before is done.

        Raises:
            SessionOver: the session was closed, or nothing came until the deadline.
        """
        self.step_done()
        with anyio.move_on_after(self._deadline_s):
            while not self._queue:
                self._changed = anyio.Event()
                await self._changed.wait()
        if not self._queue:
            raise SessionOver(f"{self.engine}: nothing came in session {self.session} within {self._deadline_s:g} s")
        self._current = self._queue.pop(0)
        if isinstance(self._current.step, SessionClosed):
            raise SessionOver(f"{self.engine}: session {self.session} was closed: {self._current.step.reason}")
        return self._current.step

    def close(self, reason: str) -> None:
        """Have the engine leave once its step at work is done or has failed."""
        self.over.set()
        self._queue.append(_Asked(SessionClosed(session=self.session, reason=reason)))
        self._changed.set()

    def step_done(self) -> None:
        """Answer the step at work."""
        if self._current is not None:
            self._current.answer()
            self._current = None

    def finish(self) -> None:
        """Say that the engine holds what the session brought."""
        self.holds = True
        self.step_done()

    def fail(self, reason: str) -> None:
        """Answer the step at work, and all that come, with a reason."""
        self._failure = self._failure or reason
        for asked in (*([self._current] if self._current else ()), *self._queue):
            asked.answer(self._failure)
        self._current = None
        self._queue.clear()


class WeightSessions:
    """Where calls of the trainer and the tasks of engines meet.

    Args:
        goal: what the engines are to take; who waits there is told of new members.
        lacking: names of engines that may be asked and lack it.
        part_of: in which of so many parts of the engines one is; none: there is one part.
    """

    def __init__(
        self, goal: Goal, lacking: Callable[[], Collection[str]], part_of: Callable[[str, int], int] | None = None
    ) -> None:
        self._goal = goal
        self._lacking = lacking
        self._part_of = part_of or _only_part
        self._waiting: dict[str, Part] = {}  # engines that want a version, by name
        self._members: list[Part] = []
        self._session = ""
        self._incarnation = 0
        self._changed = anyio.Event()

    def wanted(self) -> tuple[str, ...]:
        """Engines that stand ready for a version, and no session brings it."""
        return tuple(part.engine for part in self._waiting.values() if not part.session)

    @asynccontextmanager
    async def part(self, engine: str, key: str, place: Place, version: int) -> AsyncGenerator[Part]:
        """Have an engine stand ready for a session that brings a version.

        How the block ends is the answer to the step that is at work then.
        """
        part = Part(engine, key, place, version)
        self._waiting[engine] = part
        self._changed.set()
        reason = f"{engine} does not take part any more"
        try:
            yield part
            part.finish()
        except Exception as error:
            reason = str(error) or repr(error)
            raise
        finally:
            part.fail(reason)
            if self._waiting.get(engine) is part:
                del self._waiting[engine]
            self._changed.set()

    async def offered(self, offer: SessionOffered) -> MembersGiven:
        """Say who takes part in a session; one that was open is over.

        Raises:
            ValueError: a later trainer has led sessions already.
        """
        if offer.incarnation < self._incarnation:
            raise ValueError(f"trainer {offer.incarnation} is not the last one: {self._incarnation} is")
        self._incarnation = offer.incarnation
        self.end("another session began")
        with anyio.move_on_after(GATHER_S):
            await self._goal.reached(offer.version)
            while not {name for name in self._lacking() if self._is_meant(name, offer)} <= set(self.wanted()):
                self._changed = anyio.Event()
                await self._changed.wait()
        if self._goal.version != offer.version:
            return MembersGiven(members=(), held_back=f"engines are to hold weights {self._goal.version} now")
        ready = [part for part in self._waiting.values() if not part.session and part.version == offer.version]
        meant = (part for part in ready if self._is_meant(part.engine, offer))
        self._session, self._members = offer.session, sorted(meant, key=lambda part: part.engine)
        members = tuple(part.enter(offer.session, offer.deadline_s) for part in self._members)
        await self._goal.notify()
        return MembersGiven(members=members)

    def _is_meant(self, engine: str, offer: SessionOffered) -> bool:
        return offer.num_parts == 1 or self._part_of(engine, offer.num_parts) == offer.part

    async def step(self, step: Step) -> EnginesAnswered:
        """Have each member do a step.

        Raises:
            ValueError: the session is not open here.
        """
        if step.session != self._session:
            raise ValueError(f"session {step.session} is not open here")
        failed: dict[str, str] = {}

        async def ask(part: Part) -> None:
            if reason := await part.ask(step):
                failed[part.engine] = reason

        async with anyio.create_task_group() as group:
            for part in self._members:
                group.start_soon(ask, part)
        return EnginesAnswered(failed=failed)

    async def closed(self, step: SessionClosed) -> EnginesAnswered:
        """Have all members leave the session, if it is open."""
        if step.session == self._session:
            self.end(step.reason)
        return EnginesAnswered(failed={})

    def end(self, reason: str) -> None:
        """Have all members leave the session that is open, if there is one."""
        for part in self._members:
            part.close(reason)
        self._members, self._session = [], ""


def _only_part(_engine: str, _num_parts: int) -> int:
    return 0


def new_key(engine: str) -> str:
    """What an engine's process is called from now on, until it or its rollout actor is another."""
    return f"{engine}.{uuid.uuid4().hex[:8]}"
