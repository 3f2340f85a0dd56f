"""One engine's share of the memory that it has in common with the trainer: release and resume."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from actors.rollout.engines.status import MemoryLevel
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineSilent, EngineUnavailable, RequestRefused
from actors.rollout.sglang.memory import TAGS, EngineMemory, Notes, Tag
from messages import EnginePhase
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues
from runtime.util.memory import anonymous_bytes

log = structlog.get_logger()

IDLE_S: Final = 2.0  # time for an engine to become idle before its requests are aborted


class MemoryShare:
    """One engine's memory. A new process starts with all of it.

    Args:
        client: for the engine.
        name: of the engine.
        url: where it listens.
        pid: of its process on this machine; 0: unknown.
        is_shown: whether released memory is visible in the process's memory statistics.
        notes: stores earlier calls to it; None: nothing is stored.
    """

    def __init__(
        self,
        client: SglangClient,
        name: str,
        url: str,
        *,
        pid: int = 0,
        is_shown: bool = False,
        notes: Notes | None = None,
    ) -> None:
        self._client = client
        self._name = name
        self._url = url
        self._pid = pid
        self._is_shown = is_shown
        self._memory = EngineMemory(client, url, notes)
        self._moved: dict[MemoryLevel, EnginePhase] = {}

    @property
    def is_sure(self) -> bool:
        """Whether the engine's memory state is known. If not, the engine has to be restarted."""
        return self._memory.is_sure

    @property
    def room(self) -> MemoryLevel:
        """The highest memory level for which the engine holds memory now."""
        if "weights" in self._memory.released:
            return MemoryLevel.NOTHING
        return MemoryLevel.WEIGHTS if self._memory.released else MemoryLevel.EVERYTHING

    def moved(self, memory_level: MemoryLevel) -> EnginePhase:
        """Return the outcome of the last change to a memory level."""
        return self._moved.get(memory_level, EnginePhase(engine=self._name, reached=True))

    async def inherit(self) -> None:
        """Take over the memory state left by an earlier rollout actor.

        Raises:
            EngineUnavailable: the stored state is unreadable.
        """
        await self._memory.inherit()

    async def give_back(self) -> None:
        """Make the engine release all memory. Requests that an earlier rollout actor left there are aborted.

        Raises:
            EngineError: the engine did not release it.
        """
        if self.room is MemoryLevel.NOTHING:
            return
        await self._until_idle()
        await self._move(MemoryLevel.NOTHING, self._memory.release)

    async def take_weights(self) -> None:
        """Make the engine resume the memory for weights. The weights are undefined until the next weight update.

        Raises:
            EngineError: the engine did not resume it.
        """
        await self._move(MemoryLevel.WEIGHTS, partial(self._memory.resume, "weights"))

    async def take_rest(self) -> None:
        """Make the engine resume all other memory.

        Raises:
            EngineError: the engine did not resume it.
        """
        if self.room is not MemoryLevel.EVERYTHING:
            await self._move(MemoryLevel.EVERYTHING, self._memory.resume)

    async def _until_idle(self) -> None:
        """Wait until the engine is idle, aborting requests that do not end.

        A scheduler that gets a release while it is not idle crashes; it sends its last answer before it is idle.
        """
        while True:
            try:
                await self._client.flush_cache(self._url, IDLE_S)
            except RequestRefused as error:
                log.warning("engine_not_idle", engine=self._name, reason=str(error))
                await self._client.abort(self._url, None)
            except EngineSilent:  # the node daemon kills hung engines
                log.warning("engine_silent", engine=self._name)
            else:
                return

    async def _move(self, memory_level: MemoryLevel, move: Callable[[], Awaitable[None]]) -> None:
        if self._pid and not _is_there(self._pid):
            raise EngineUnavailable(f"{self._url}: its process has ended, and another one may listen there")
        begin, before = time.perf_counter(), self._bytes()
        await move()
        took_s, after = time.perf_counter() - begin, self._bytes()
        log.info("engine_memory_moved", engine=self._name, to=memory_level.name.lower(), took_s=took_s)
        self._moved[memory_level] = EnginePhase(
            engine=self._name, reached=True, took_s=took_s, bytes_before=before, bytes_after=after
        )

    def _bytes(self) -> int | None:
        return anonymous_bytes(self._pid) if self._is_shown else None


class ReleasedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The released memory of one engine process, in the run's bucket: engines do not report it."""

    pid: int
    released: tuple[str, ...]
    sure: bool  # the engine confirmed it


class MemoryNotes:
    """Notes of one engine process; notes of an earlier process of that name are ignored."""

    def __init__(self, kv: KeyValues, engine: str, pid: int) -> None:
        self._kv = kv
        self._key = f"memory.{engine}"
        self._pid = pid

    async def read(self) -> tuple[list[Tag], bool]:
        """Return the released memory kinds, and whether that is certain.

        Raises:
            EngineUnavailable: the bucket is unreadable, so the state is unknown.
        """
        try:
            entry = await self._kv.get(self._key, ReleasedMemory)
        except BusError as error:
            raise EngineUnavailable(f"{self._key} cannot be read: {error}") from error
        noted = None if entry is None else entry.value
        if noted is None or noted.pid != self._pid:
            return [], True
        return [tag for tag in TAGS if tag in noted.released], noted.sure

    async def write(self, released: list[Tag], *, sure: bool) -> None:
        """Store which memory kinds are released. Called before and after each memory call to the engine.

        Raises:
            EngineUnavailable: the bucket is not writable.
        """
        try:
            await self._kv.put(self._key, ReleasedMemory(pid=self._pid, released=tuple(released), sure=sure))
        except BusError as error:
            raise EngineUnavailable(f"{self._key} cannot be written: {error}") from error


def _is_there(pid: int) -> bool:
    """Return whether a process on this machine still exists. Its successor starts only after it has ended."""
    return Path(f"/proc/{pid}").exists()
