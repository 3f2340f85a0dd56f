"""The rollout actor's side of a weight sync: its members, each engine's steps, and the calls of the trainer.

The trainer leads by RPC; each engine's own task runs the requested steps. A call returns once all engines concerned
have finished the step or failed. Only one weight sync is open at a time: a new one, or a later trainer, closes it.
"""

import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol

import anyio
import msgspec
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from messages import (
    BucketSent,
    WeightsAnnounced,
    WeightSyncAnswered,
    WeightSyncDecided,
    WeightSyncMember,
    WeightSyncPrepared,
    WeightSyncRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError

log = structlog.get_logger()

ANSWER_S: Final = 5.0  # after which a call about a long step is answered with what its engines do
GATHER_S: Final = 5.0  # for engines that are not ready yet; the weight sync starts without them
LONG: Final = (WeightSyncPrepared, WeightSyncDecided)  # steps whose calls are answered before they end
ASK_EVERY_S: Final = 1.0  # interval of weight-sync requests while engines wait for one
ASK_TIMEOUT_S: Final = 10.0
SYNC_CALLS: Final = (WeightSyncPrepared, BucketSent, WeightSyncDecided)
Step = WeightSyncPrepared | BucketSent | WeightSyncDecided


class Goal(Protocol):
    """The target weights of a rollout actor's engines."""

    @property
    def version(self) -> int:
        """The target version."""
        ...

    async def reached(self, version: int) -> None:
        """Wait until the target is this version or a newer one."""
        ...

    async def notify(self) -> None:
        """Make waiters check their conditions again."""
        ...


class SyncClosed(EngineUnavailable):
    """A weight sync closed before an engine held the version. The engine may hold part of it."""


class MemberShape(NamedTuple):
    """An engine's ranks and layout in a weight sync."""

    num_ranks: int  # ranks that receive weights, each its shard
    is_compared: bool  # its checksums will be verified


class _RequestedStep:
    """A requested step of one engine."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.error = ""
        self.done = anyio.Event()

    def answer(self, error: str = "") -> None:
        self.error = self.error or error
        self.done.set()


class SyncMember:
    """One engine's membership in a weight sync: its task takes the steps one by one and reports the results."""

    def __init__(self, engine: str, key: str, shape: MemberShape, version: int) -> None:
        self.engine = engine
        self.key = key
        self.shape = shape
        self.version = version
        self.session = ""  # id of the weight sync, once the engine is a member
        self.holds = False  # the engine holds the weights of the weight sync
        self.received_bytes = 0  # of the buckets so far
        self.over = anyio.Event()  # the weight sync was closed
        self._deadline_s = 0.0
        self._called_at = 0.0  # time of the trainer's last call
        self._last_done: Step | None = None
        self._failure = ""
        self._queue: list[_RequestedStep] = []
        self._current: _RequestedStep | None = None
        self._changed = anyio.Event()

    def enter(self, session: str, deadline_s: float) -> None:
        """Join a weight sync."""
        self.session, self._deadline_s, self._called_at = session, deadline_s, anyio.current_time()

    def described(self) -> WeightSyncMember:
        """Describe the member to the trainer."""
        return WeightSyncMember(engine=self.engine, key=self.key, **self.shape._asdict())

    async def ask(self, step: Step) -> str:
        """Run a step on the engine; return why it failed, or an empty string.

        A step that may take long may be repeated: it runs once. A bucket sent twice is received twice, and refused.
        """
        self._called_at = anyio.current_time()
        self._changed.set()
        if self.holds and isinstance(step, WeightSyncDecided):
            return ""
        if self._failure:
            return self._failure
        may_repeat = isinstance(step, LONG)
        if may_repeat and step == self._last_done:
            return ""
        at_work = (*([self._current] if self._current else ()), *self._queue)
        requested = next((each for each in at_work if may_repeat and each.step == step), None)
        if requested is None:
            requested = _RequestedStep(step)
            self._queue.append(requested)
        await requested.done.wait()
        return requested.error

    async def next(self) -> Step:
        """Finish the previous step and return the next one.

        Raises:
            SyncClosed: the weight sync was closed, or the trainer did not call before the deadline.
        """
        self.step_done()
        while not self._queue:
            left_s = self._called_at + self._deadline_s - anyio.current_time()
            if left_s <= 0:
                raise SyncClosed(
                    f"{self.engine}: no step of weight sync {self.session} arrived within {self._deadline_s:g} s"
                )
            self._changed = anyio.Event()
            with anyio.move_on_after(left_s):
                await self._changed.wait()
        self._current = self._queue.pop(0)
        step = self._current.step
        if isinstance(step, WeightSyncDecided) and not step.is_commit:
            raise SyncClosed(f"{self.engine}: weight sync {self.session} was closed: {step.reason}")
        return step

    def close(self, reason: str) -> None:
        """Make the engine leave once its current step has ended."""
        self.over.set()
        self._queue.append(_RequestedStep(WeightSyncDecided(session=self.session, is_commit=False, reason=reason)))
        self._changed.set()

    def step_done(self) -> None:
        """Report success of the current step."""
        if self._current is not None:
            self._current.answer()
            self._last_done = self._current.step
            self._called_at = anyio.current_time()
            self._current = None

    def finish(self) -> None:
        """Report that the engine holds the weights of the weight sync."""
        self.holds = True
        self.step_done()

    def fail(self, reason: str) -> None:
        """Fail the current step and all later ones with a reason."""
        self._failure = self._failure or reason
        for requested in (*([self._current] if self._current else ()), *self._queue):
            requested.answer(self._failure)
        self._current = None
        self._queue.clear()


class WeightSyncs:
    """Connects the trainer's weight-sync calls to the tasks of the engines.

    Args:
        goal: the target weights; its waiters are notified of new members.
        lacking: names of the engines that are ready for the target weights and lack them.
        group_of: maps an engine and a number of update groups to the engine's group; None: there is one group.
        doing: describes what an engine does in its update.
    """

    def __init__(
        self,
        goal: Goal,
        lacking: Callable[[], Collection[str]],
        group_of: Callable[[str, int], int] | None = None,
        doing: Callable[[str], str] = str,
    ) -> None:
        self._doing = doing
        self._goal = goal
        self._lacking = lacking
        self._group_of = group_of or _only_group
        self._waiting: dict[str, SyncMember] = {}  # engines that wait for a version, by name
        self._members: list[SyncMember] = []
        self._session = ""  # the open weight sync
        self._newest = ""  # the last one that was opened
        self._incarnation = 0
        self._changed = anyio.Event()

    def wanted(self) -> tuple[str, ...]:
        """Names of the engines that wait for a version and are in no weight sync."""
        return tuple(member.engine for member in self._waiting.values() if not member.session)

    @asynccontextmanager
    async def member(self, engine: str, key: str, shape: MemberShape, version: int) -> AsyncGenerator[SyncMember]:
        """Offer an engine as a member of a weight sync for a version.

        An exception in the block is the result of the engine's current step. It reports that it holds the weights by
        `finish`; otherwise it leaves the weight sync at the end of the block.
        """
        member = SyncMember(engine, key, shape, version)
        self._waiting[engine] = member
        self._changed.set()
        reason = f"{engine} left the weight sync"
        try:
            yield member
        except Exception as error:
            reason = str(error) or repr(error)
            raise
        finally:
            member.fail(reason)
            if self._waiting.get(engine) is member:
                del self._waiting[engine]
            self._changed.set()

    async def prepared(self, step: WeightSyncPrepared) -> WeightSyncAnswered:
        """Prepare engines for a weight sync; the answer names them. Repeated calls go on with the same engines.

        Raises:
            ValueError: the call comes from a trainer that was replaced, or this weight sync was closed.
        """
        if step.session != self._session:
            await self._open(step)
        answer = await self.step(step)
        return msgspec.structs.replace(answer, members=tuple(member.described() for member in self._members))

    async def _open(self, step: WeightSyncPrepared) -> None:
        """Choose the members of a new weight sync, after closing an open one."""
        if step.incarnation < self._incarnation:
            raise ValueError(f"trainer {step.incarnation} was replaced by trainer {self._incarnation}")
        _refuse_unless(step.session != self._newest, step.session)  # it was closed
        self._incarnation, self._newest = step.incarnation, step.session
        self.end("another weight sync began")
        with anyio.move_on_after(GATHER_S):
            await self._goal.reached(step.version)
            while not {name for name in self._lacking() if self._is_meant(name, step)} <= set(self.wanted()):
                self._changed = anyio.Event()
                await self._changed.wait()
        _refuse_unless(step.session == self._newest, step.session)  # another one began meanwhile
        self._session, self._members = step.session, []
        if self._goal.version != step.version:
            log.info("weight_sync_held_back", weight_version=step.version, target=self._goal.version)
            return
        ready = [member for member in self._waiting.values() if not member.session and member.version == step.version]
        meant = (member for member in ready if self._is_meant(member.engine, step))
        self._members = sorted(meant, key=lambda member: member.engine)
        for member in self._members:
            member.enter(step.session, step.deadline_s)
        await self._goal.notify()

    def _is_meant(self, engine: str, step: WeightSyncPrepared) -> bool:
        return step.num_parts == 1 or self._group_of(engine, step.num_parts) == step.part

    async def step(self, step: Step) -> WeightSyncAnswered:
        """Run a step on each member.

        A step that pauses or verifies engines may take long. Its call is answered after ANSWER_S, with the engines that
        are still at work. The trainer then calls again.

        Raises:
            ValueError: this weight sync is not open here.
        """
        _refuse_unless(step.session == self._session, step.session)
        failed: dict[str, str] = {}
        pending = {member.engine for member in self._members}

        async def ask(member: SyncMember) -> None:
            if reason := await member.ask(step):
                failed[member.engine] = reason
            pending.remove(member.engine)

        with anyio.move_on_after(ANSWER_S if isinstance(step, LONG) else math.inf):
            async with anyio.create_task_group() as group:
                for member in self._members:
                    group.start_soon(ask, member)
        return WeightSyncAnswered(failed=failed, pending={engine: self._doing(engine) for engine in pending})

    async def decided(self, step: WeightSyncDecided) -> WeightSyncAnswered:
        """Commit a weight sync on each member, or make all members leave it, if it is open.

        Raises:
            ValueError: the weight sync to commit is not open here.
        """
        if step.is_commit:
            return await self.step(step)
        if step.session == self._session:
            self.end(step.reason)
        return WeightSyncAnswered()

    def end(self, reason: str) -> None:
        """Close the open weight sync, if there is one: all members leave."""
        for member in self._members:
            member.close(reason)
        self._members, self._session = [], ""


async def take_part(
    bus: Bus,
    syncs: WeightSyncs,
    announced: Callable[[], WeightsAnnounced | None],
    is_given_up: Callable[[], Awaitable[bool]],
) -> None:
    """Serve the trainer's weight-sync calls, and request a weight sync for engines that missed one. Never returns.

    Args:
        bus: to be called on.
        syncs: of the engines.
        announced: returns the target weights.
        is_given_up: whether engines move on to newer weights because no process has the target's any more.
    """
    async with bus.serve(
        {WeightSyncPrepared: syncs.prepared, BucketSent: syncs.step, WeightSyncDecided: syncs.decided}
    ):
        while True:
            await anyio.sleep(ASK_EVERY_S)
            target, engines = announced(), syncs.wanted()
            if target is not None and target.sender and engines:
                await _ask(bus, target, engines, is_given_up)


async def _ask(
    bus: Bus, target: WeightsAnnounced, engines: tuple[str, ...], is_given_up: Callable[[], Awaitable[bool]]
) -> None:
    """Request a weight sync for engines that wait for one. The trainer may be down or busy: the next poll retries."""
    request = WeightSyncRequested(version=target.version, engines=engines)
    try:
        if await is_given_up():
            return
        answer = await bus.call(target.sender, request, WeightSyncAnswered, timeout_s=ASK_TIMEOUT_S)
    except BusError as error:
        log.debug("weight_sync_not_requested", weight_version=target.version, error=str(error))
    else:
        log.debug("weight_sync_requested", weight_version=target.version, refused=answer.failed)


def _refuse_unless(is_open: bool, session: str) -> None:
    if not is_open:
        raise ValueError(f"weight sync {session} is not open here")


def _only_group(_engine: str, _num_parts: int) -> int:
    return 0


def new_key(engine: str) -> str:
    """Create an id for an engine's process, valid until the engine or its rollout actor restarts."""
    return f"{engine}.{uuid.uuid4().hex[:8]}"
