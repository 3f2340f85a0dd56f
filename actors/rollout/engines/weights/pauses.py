"""Which engines we have paused; of those that others run the bus knows too, for our successor."""

from collections.abc import Collection

import anyio
import structlog

from actors.rollout.sglang.errors import EngineUnavailable
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues

log = structlog.get_logger()


class Pauses:
    """Engines that we paused and that were not told to go on since, by URL.

    An engine does not know who paused it. So a pause of one that others run is noted on the bus before it begins, until
    it has ended: the next rollout actor of the run ends this one, and nobody else's. A note without a pause, as of an
    actor that died in between, is forgotten as soon as the engine is seen to generate.

    Args:
        kv: the run's bucket; none: nothing is noted.
        pool: of the engines.
        others: URLs of the engines that others run.
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
        """Take over what an earlier rollout actor has left paused.

        Raises:
            BusError: the bucket cannot be read.
        """
        entry = None if self._kv is None else await self._kv.get(self._key, list[str])
        if entry is not None and entry.value is not None:
            self._urls |= self._others & frozenset(entry.value)

    async def begin(self, url: str) -> None:
        """We are about to pause an engine.

        Raises:
            EngineUnavailable: it is not to be, since that cannot be noted.
        """
        async with self._noting:
            try:
                await self._note(url, self._urls | {url})
            except BusError as error:
                raise EngineUnavailable(f"{url}: is not paused, since that cannot be noted: {error}") from error
            self._urls.add(url)

    async def end(self, url: str) -> None:
        """It generates: whoever ended the pause, or whichever server that is."""
        if url not in self._urls:
            return
        self._urls.discard(url)
        async with self._noting:
            try:
                await self._note(url, self._urls)
            except BusError as error:  # the next note leaves it out; an actor that comes before finds it generating
                log.warning("pause_still_noted", url=url, error=str(error))

    async def _note(self, url: str, paused: Collection[str]) -> None:
        if self._kv is not None and url in self._others:
            await self._kv.put(self._key, sorted(self._others.intersection(paused)))
