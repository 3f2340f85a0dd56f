"""Stores the released memory of each engine in the run's bucket, since engines do not report it.

The next rollout actor reads it from there.
"""

import msgspec
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from actors.rollout.sglang.memory import TAGS, Tag
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues

log = structlog.get_logger()


class ReleasedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The released memory of one engine process."""

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
