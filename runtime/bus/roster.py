"""Membership of a role, stored in the run's bucket. Each change raises its epoch."""

from collections.abc import Callable, Mapping
from typing import Final, Generic

import anyio
import msgspec
import structlog

from messages import Message, MessageT
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallError, CallRefused, Fenced, SequenceMismatch
from runtime.bus.kv import Watch

log = structlog.get_logger()

MAX_TRIES: Final = 64  # compare-and-set attempts against concurrent changes


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an actor instance."""

    instance: str
    incarnation: int  # higher for each later process of the instance
    node: str


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a role at one epoch, in order of joining."""

    epoch: int = 0
    members: tuple[Member, ...] = ()


class Answers(msgspec.Struct, Generic[MessageT], frozen=True, kw_only=True):
    """Results of a call to all members of one epoch."""

    epoch: int  # epoch of the called members
    answers: Mapping[str, MessageT]  # by instance
    refused: Mapping[str, str]  # error answers by instance
    evicted: tuple[str, ...]  # instances that did not answer; if any, the epoch was raised


class Roster:
    """Join, leave and call the members of a role."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def members(self, role: str) -> Members:
        """The current members."""
        entry = await self._bus.kv.get(_key(role), Members)
        return entry.value if entry is not None and entry.value is not None else Members()

    async def join(self, role: str, member: Member) -> Members:
        """Add a member. It replaces an earlier process of its instance."""

        def change(members: tuple[Member, ...]) -> tuple[Member, ...]:
            if member in members:
                return members
            return (*(other for other in members if other.instance != member.instance), member)

        return await self._change(role, change)

    async def leave(self, role: str, member: Member) -> Members:
        """Remove a member, but not a later process of its instance."""
        return await self._change(role, lambda members: tuple(other for other in members if other != member))

    async def call_all(
        self, role: str, request: Message, answer: type[MessageT], *, timeout_s: float
    ) -> Answers[MessageT]:
        """Call all current members concurrently, each with the same deadline, and evict those that do not answer.

        Raises:
            BusUnavailable: the roster cannot be read or changed.
        """
        asked = await self.members(role)
        answers: dict[str, MessageT] = {}
        refused: dict[str, str] = {}
        silent: list[Member] = []

        async def ask(member: Member) -> None:
            try:
                answers[member.instance] = await self._bus.call(member.instance, request, answer, timeout_s=timeout_s)
            except CallRefused as error:
                refused[member.instance] = str(error)
            except CallError as error:
                log.warning("member_silent", role=role, instance=member.instance, error=repr(error))
                silent.append(member)

        async with anyio.create_task_group() as group:
            for member in asked.members:
                group.start_soon(ask, member)
        if silent:
            await self._change(role, lambda members: tuple(other for other in members if other not in silent))
        evicted = tuple(sorted(member.instance for member in silent))
        return Answers(epoch=asked.epoch, answers=answers, refused=refused, evicted=evicted)

    async def keep_joined(self, role: str, member: Member) -> None:
        """Stay a member until cancelled: rejoin after an eviction, yield to a later process.

        Raises:
            Fenced: a later process of the instance joined.
        """
        await self.join(role, member)
        async with self._bus.kv.watch(_key(role), Members) as changes:
            await self._guard(role, member, changes)

    async def _guard(self, role: str, member: Member, changes: Watch[Members]) -> None:
        async for entry in changes:
            members = entry.value.members if entry.value is not None else ()
            if member in members:
                continue
            later = [other for other in members if other.instance == member.instance]
            if later and later[0].incarnation > member.incarnation:
                raise Fenced(f"a newer process runs {member.instance}: {later[0]}")
            log.warning("roster_joined_again", role=role, instance=member.instance)
            await self.join(role, member)

    async def _change(self, role: str, change: Callable[[tuple[Member, ...]], tuple[Member, ...]]) -> Members:
        key = _key(role)
        for _ in range(MAX_TRIES):
            entry = await self._bus.kv.get(key, Members)
            present = entry.value if entry is not None and entry.value is not None else Members()
            members = change(present.members)
            if members == present.members:
                return present
            wanted = Members(epoch=present.epoch + 1, members=members)
            try:
                if entry is None:
                    await self._bus.kv.create(key, wanted)
                else:
                    await self._bus.kv.update(key, wanted, entry.revision)
            except SequenceMismatch:
                continue
            log.info("roster_changed", role=role, epoch=wanted.epoch, members=[one.instance for one in members])
            return wanted
        raise BusError(f"roster of {role}: not updated in {MAX_TRIES} tries; other processes changed it each time")


def _key(role: str) -> str:
    return f"roster.{role}"
