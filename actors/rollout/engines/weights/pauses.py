"""Tracks the engines paused by the run. For external engines it stores this on the bus for the next rollout actor."""

from collections.abc import Collection

import anyio
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues

log = structlog.get_logger()


class Pauses:
    """URLs of engines that the run paused and has not continued since.

    An engine does not report which client paused it. So a pause of an external engine is noted on the bus before it
    begins, and until it ends. The next rollout actor of the run ends exactly those pauses. A stale note, e.g. after a
    crash before the pause, is dropped as soon as the engine generates.

    Args:
        kv: the run's bucket; None: nothing is stored.
        pool: of the engines.
        others: URLs of the external engines.
    """

    def __init__(self, kv: KeyValues | None = None, pool: str = "", others: Collection[str] = ()) -> None:
        self._kv = kv
        self._key = f"paused.{pool}"
        self._others = frozenset(others)
        self._urls: set[str] = set()
        self._noting = anyio.Lock()

    def __contains__(self, url: str) -> bool:
        return url in self._urls

    async def inherit(self) -> None:
        """Take over the pauses that an earlier rollout actor left.

        Raises:
            BusError: the bucket is unreadable.
        """
        entry = None if self._kv is None else await self._kv.get(self._key, list[str])
        if entry is not None and entry.value is not None:
            self._urls |= self._others & frozenset(entry.value)

    async def begin(self, url: str) -> None:
        """Note that an engine is about to be paused.

        Raises:
            EngineUnavailable: the note cannot be written, so the engine must not be paused.
        """
        async with self._noting:
            try:
                await self._note(url, self._urls | {url})
            except BusError as error:
                raise EngineUnavailable(
                    f"{url}: not paused, because the pause could not be recorded: {error}"
                ) from error
            self._urls.add(url)

    async def end(self, url: str) -> None:
        """Remove the note: the engine generates, whatever ended its pause."""
        if url not in self._urls:
            return
        self._urls.discard(url)
        async with self._noting:
            try:
                await self._note(url, self._urls)
            except BusError as error:  # the next write omits it; a new actor before that finds the engine generating
                log.warning("pause_still_noted", url=url, error=str(error))

    async def _note(self, url: str, paused: Collection[str]) -> None:
        if self._kv is not None and url in self._others:
            await self._kv.put(self._key, sorted(self._others.intersection(paused)))
