"""Fences rollout actors: a key per engine names the process that may command it, and the newest process has it.

Engines do not read the key. So a process that stood still for longer than the key's lifetime reads it before its next
call, and ends if a later process has the engine. That one waits for as long before its first call, unless its
predecessor has certainly ended. A call that was under way meanwhile is found by its weight label: the successor does
not know it, uses no token under it, and updates the engine again.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from runtime.bus.errors import BusError, Fenced, SequenceMismatch
from runtime.bus.kv import KeyValues
from runtime.util.proc import BEGUN, STATE, stat_of

log = structlog.get_logger()

LIFETIME_S: Final = 10.0  # for which a key that was read counts
CONFIRM_EVERY_S: Final = 3.0
RELEASE_S: Final = 2.0  # at shutdown
PROC: Final = Path("/proc")
BOOT_ID: Final = PROC / "sys/kernel/random/boot_id"
SEPARATOR: Final = " "
MAX_TRIES: Final = 64  # compare-and-set attempts against concurrent changes of one key


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that may command an engine."""

    instance: str
    incarnation: int  # higher for each later process, of any instance
    process: str = ""  # its identity


def _now() -> float:
    """Return seconds that also pass while the process, or its machine, stands still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ownership:
    """The engines that this process may command.

    Args:
        kv: the run's bucket.
        pool: of the engines.
        instance: name of the rollout actor.
        lifetime_s: seconds for which a key that was read counts.
    """

    def __init__(self, kv: KeyValues, pool: str, instance: str, *, lifetime_s: float = LIFETIME_S) -> None:
        self._kv = kv
        self._prefix = f"owner.{pool}."
        self._counter = f"owners.{pool}"
        self._lifetime_s = lifetime_s
        self._me = Owner(instance=instance, incarnation=0)
        self._until: dict[str, float] = {}  # by engine: when its key is to be read again
        self._names: dict[str, str] = {}  # engines by URL

    async def begin(self) -> None:
        """Take an incarnation above those of all processes before this one.

        Raises:
            BusError: the bucket cannot be written.
        """
        incarnation = await self._kv.put(self._counter, self._me.instance)
        self._me = Owner(instance=self._me.instance, incarnation=incarnation, process=own_identity())

    async def claim(self, engine: str, url: str) -> None:
        """Become the owner of an engine, and wait until an earlier one cannot command it any more.

        Raises:
            Fenced: a later process has it.
            BusError: the bucket cannot be read or written.
        """
        before, asked_at = await self._take(engine)
        if before is not None and not has_certainly_ended(before.process):
            log.info("engine_taken_over", engine=engine, owner=before.instance, waits_s=self._lifetime_s)
            await anyio.sleep(self._lifetime_s)
        self._until[engine] = asked_at + self._lifetime_s
        self._names = {known: name for known, name in self._names.items() if name != engine} | {url: engine}

    async def check(self, url: str) -> None:
        """Return if this process may command the engine at a URL now. Engines without an owner are anybody's.

        Raises:
            Fenced: a later process has it.
            EngineUnavailable: its key is to be read, and cannot be.
        """
        engine = self._names.get(url)
        if engine is None or _now() < self._until[engine]:
            return
        try:
            await self.confirm()
        except Fenced:
            raise
        except BusError as error:
            raise EngineUnavailable(
                f"{url}: not called, because the key of its owner cannot be read: {error}"
            ) from error

    async def run(self) -> None:
        """Read the keys now and then. At the end give them up. Never returns.

        Raises:
            Fenced: a later process has an engine.
        """
        try:
            while True:
                await anyio.sleep(CONFIRM_EVERY_S)
                try:
                    await self.confirm()
                except Fenced:
                    raise
                except BusError as error:  # from then on each call reads it
                    log.warning("owners_not_read", error=str(error))
        finally:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._release()

    async def confirm(self) -> None:
        """Read the keys of all engines of this process.

        Raises:
            Fenced: a later process has one of them.
            BusError: the bucket cannot be read.
        """
        asked_at, engines = _now(), list(self._until)
        found = {entry.key: entry.value for entry in await self._kv.latest(self._prefix + ">", Owner)}
        for engine in engines:
            owner = found.get(self._prefix + engine)
            if owner is None:  # a later process had it, and gave it up
                await self._take(engine)
            elif owner != self._me:
                raise self._fenced(engine, owner)
            self._until[engine] = asked_at + self._lifetime_s

    async def _take(self, engine: str) -> tuple[Owner | None, float]:
        """Write an engine's key; return its earlier owner, and when this process asked for the key."""
        key = self._prefix + engine
        for _ in range(MAX_TRIES):
            asked_at = _now()
            entry = await self._kv.get(key, Owner)
            before = None if entry is None else entry.value
            if before is not None and before.incarnation > self._me.incarnation:
                raise self._fenced(engine, before)
            with suppress(SequenceMismatch):  # another process was first
                if entry is None or before is None:
                    await self._kv.create(key, self._me)
                elif before != self._me:
                    await self._kv.update(key, self._me, entry.revision)
                return (None if before == self._me else before), asked_at
        raise BusError(f"{key}: not taken in {MAX_TRIES} tries; others changed it each time")

    async def _release(self) -> None:
        """Give the engines up, so that the next process need not wait."""
        for engine in self._until:
            key = self._prefix + engine
            try:
                entry = await self._kv.get(key, Owner)
                if entry is not None and entry.value == self._me:
                    await self._kv.delete(key, revision=entry.revision)
            except BusError as error:  # the next process waits
                log.warning("owner_not_released", engine=engine, error=str(error))

    def _fenced(self, engine: str, owner: Owner) -> Fenced:
        by = f"{owner.instance} (incarnation {owner.incarnation})"
        return Fenced(f"{self._me.instance} (incarnation {self._me.incarnation}): {by} drives {engine} now")


def own_identity() -> str:
    """Identify this process: boot of the machine, namespace of its ids, its id, and when it began."""
    pid = os.getpid()
    return SEPARATOR.join((_place(), str(pid), _begun(pid)))


def has_certainly_ended(identity: str) -> bool:
    """Whether a process has ended, as far as this machine can tell; False for one of another machine or container."""
    parts = identity.split(SEPARATOR)
    if len(parts) != 4 or SEPARATOR.join(parts[:2]) != _place() or not parts[2].isdecimal():
        return False
    return _begun(int(parts[2])) != parts[3]


def _place() -> str:
    """Name the machine's boot and this process's namespace of process ids, which two containers do not share."""
    return SEPARATOR.join((BOOT_ID.read_text().strip(), os.readlink(PROC / "self/ns/pid")))


def _begun(pid: int) -> str:
    """Return when a process began, in ticks since the boot; empty if there is none, or it waits to be reaped."""
    try:
        fields = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[STATE] == "Z" else fields[BEGUN]
