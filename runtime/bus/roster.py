"""Membership of a role: one key per member in the run's bucket, with a lifetime. Each change raises its epoch."""

from collections.abc import Mapping
from typing import Final, Generic, NamedTuple

import anyio
import msgspec
import structlog

from messages import Message, MessageT
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallError, CallRefused, Fenced, SequenceMismatch
from runtime.bus.kv import Entry

log = structlog.get_logger()

LIFETIME_S: Final = 60  # of a membership without renewal, in whole seconds as the bucket needs
RENEW_EVERY_S: Final = 10.0
LEAVE_TIMEOUT_S: Final = 2.0
MAX_TRIES: Final = 64  # compare-and-set attempts against concurrent changes of one key


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


class _Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a member's key. Revisions of the bucket count its writes: they order processes without a clock."""

    instance: str
    node: str
    incarnation: int = 0  # 0: the revision of this value, which is the process's first
    joined: int = 0  # revision with which it joined; 0: this one. A renewal keeps it

    def member(self, revision: int) -> Member:
        return Member(instance=self.instance, incarnation=self.incarnation or revision, node=self.node)


class Roster:
    """Join, leave and call the members of a role.

    A key has the bucket's next revision after each join, and an expiry or a removal leaves a mark with one. So the
    highest of these revisions is the epoch: it rises with each change and with nothing else. A member writes its own
    key alone, so any number of members may join at once.
    """

    def __init__(self, bus: Bus, *, lifetime_s: int = LIFETIME_S, renew_every_s: float = RENEW_EVERY_S) -> None:
        self._bus = bus
        self._lifetime_s = lifetime_s
        self._renew_every_s = renew_every_s

    async def members(self, role: str) -> Members:
        """The current members."""
        epoch = 0
        joined: list[tuple[int, Member]] = []
        for entry in await self._bus.kv.latest(_filter(role), _Membership):
            since = entry.revision if entry.value is None else entry.value.joined or entry.revision
            epoch = max(epoch, since)
            if entry.value is not None:
                joined.append((since, entry.value.member(entry.revision)))
        return Members(epoch=epoch, members=tuple(member for _, member in sorted(joined, key=lambda item: item[0])))

    async def enter(self, role: str, instance: str, node: str) -> Member:
        """Add a new process, in place of an earlier process of its instance."""
        value = _Membership(instance=instance, node=node)
        revision = await self._bus.kv.put(_key(role, instance), value, ttl_s=self._lifetime_s)
        log.info("roster_joined", role=role, instance=instance, epoch=revision)
        return value.member(revision)

    async def join(self, role: str, member: Member) -> None:
        """Add a member, unless it is there. It replaces an earlier process of its instance.

        Raises:
            Fenced: a later process of the instance is there.
        """
        await self._hold(role, member, None)

    async def leave(self, role: str, member: Member) -> None:
        """Remove a member, but not a later process of its instance."""
        key = _key(role, member.instance)
        for _ in range(MAX_TRIES):
            entry = await self._bus.kv.get(key, _Membership)
            if entry is None or entry.value is None or entry.value.member(entry.revision) != member:
                return
            try:
                await self._bus.kv.delete(key, revision=entry.revision)
            except SequenceMismatch:  # it was renewed meanwhile
                continue
            log.info("roster_left", role=role, instance=member.instance)
            return
        raise BusError(
            f"roster of {role}: {member.instance} not updated in {MAX_TRIES} tries; others changed it each time"
        )

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
        silent: list[str] = []

        async def ask(member: Member) -> None:
            try:
                answers[member.instance] = await self._bus.call(member.instance, request, answer, timeout_s=timeout_s)
            except CallRefused as error:
                refused[member.instance] = str(error)
            except CallError as error:
                log.warning("member_silent", role=role, instance=member.instance, error=repr(error))
                silent.append(member.instance)
                await self.leave(role, member)

        async with anyio.create_task_group() as group:
            for member in asked.members:
                group.start_soon(ask, member)
        return Answers(epoch=asked.epoch, answers=answers, refused=refused, evicted=tuple(sorted(silent)))

    async def stay(self, role: str, instance: str, node: str) -> None:
        """Be a member until cancelled, as a new process of an instance.

        Raises:
            Fenced: a later process of the instance joined.
        """
        member = await self.enter(role, instance, node)
        try:
            await self.keep_joined(role, member)
        finally:
            with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                try:
                    await self.leave(role, member)
                except BusError as error:  # the next call to the role gets no answer and evicts it
                    log.warning("roster_not_left", role=role, error=str(error))

    async def keep_joined(self, role: str, member: Member) -> None:
        """Renew a membership until cancelled. Rejoin after an eviction or an expiry, yield to a later process.

        Raises:
            Fenced: a later process of the instance joined.
        """
        held: _Held | None = None
        replaced = anyio.Event()

        def note(value: _Membership | None) -> None:
            if value is None or value.incarnation != member.incarnation:
                replaced.set()

        async with self._bus.kv.changes(_key(role, member.instance), _Membership, note):
            while True:
                try:
                    held = await self._hold(role, member, held)
                except Fenced:
                    raise
                except BusError as error:
                    log.warning("membership_not_renewed", role=role, instance=member.instance, error=str(error))
                with anyio.move_on_after(self._renew_every_s):
                    await replaced.wait()
                replaced = anyio.Event()

    async def _hold(self, role: str, member: Member, held: "_Held | None") -> "_Held":
        """Write a member's key, unless a later process of the instance has it."""
        key = _key(role, member.instance)
        for _ in range(MAX_TRIES):
            if held is None:
                entry = await self._bus.kv.get(key, _Membership)
                held = _held_in(entry, member)
            value = _Membership(
                instance=member.instance, node=member.node, incarnation=member.incarnation, joined=held.joined
            )
            try:
                if held.revision:
                    revision = await self._bus.kv.update(key, value, held.revision, ttl_s=self._lifetime_s)
                else:
                    revision = await self._bus.kv.create(key, value, ttl_s=self._lifetime_s)
            except SequenceMismatch:
                held = None
                continue
            if not held.joined:
                log.info("roster_joined", role=role, instance=member.instance, epoch=revision)
            return _Held(revision, held.joined or revision)
        raise BusError(
            f"roster of {role}: {member.instance} not updated in {MAX_TRIES} tries; others changed it each time"
        )


class _Held(NamedTuple):
    """A member's key as its process last wrote or found it."""

    revision: int  # 0: the key has no value
    joined: int  # 0: the process is not a member


def _held_in(entry: Entry[_Membership] | None, member: Member) -> _Held:
    if entry is None or entry.value is None:
        return _Held(0, 0)
    other = entry.value.member(entry.revision)
    if other.incarnation > member.incarnation:
        raise Fenced(f"a newer process runs {member.instance}: {other}")
    return _Held(entry.revision, (entry.value.joined or entry.revision) if other == member else 0)


async def instances(bus: Bus) -> list[str]:
    """The instances that are members of any role."""
    entries = await bus.kv.latest(_filter("*"), _Membership)
    return [entry.value.instance for entry in entries if entry.value is not None]


def _key(role: str, instance: str) -> str:
    return f"roster.{role}.{instance}"


def _filter(role: str) -> str:
    return f"roster.{role}.>"
