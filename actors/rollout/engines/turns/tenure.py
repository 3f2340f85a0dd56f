"""What one engine has of the memory that it shares with the trainer, and how it gives that back and takes it."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from actors.rollout.engines.turns.occupancy import anonymous_bytes, is_there
from actors.rollout.engines.turns.stages import Stage
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineSilent, EngineUnavailable, RequestRefused
from actors.rollout.sglang.memory import EngineMemory, Notes
from messages import EngineTurn

log = structlog.get_logger()

IDLE_S: Final = 2.0  # that an engine is given to become idle, before what is left there is aborted


class TurnLost(Exception):
    """The memory that the engine was to have is the trainer's again."""


class Tenure:
    """One engine's memory; all of it is the engine's from the start of its process on.

    Args:
        client: for the engine.
        name: of the engine.
        url: where it listens.
        pid: of its process on this machine; 0: not known.
        is_shown: whether what it gives back shows as memory of that process.
        notes: what it was told before; none: nothing is kept.
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
        self._moved: dict[Stage, EngineTurn] = {}

    @property
    def is_sure(self) -> bool:
        """Whether it is known what the engine has. If not, only a new process is of use."""
        return self._memory.is_sure

    @property
    def room(self) -> Stage:
        """What it has room for."""
        if "weights" in self._memory.released:
            return Stage.NOTHING
        return Stage.WEIGHTS if self._memory.released else Stage.EVERYTHING

    def moved(self, stage: Stage) -> EngineTurn:
        """What came of its last way to a stage."""
        return self._moved.get(stage, EngineTurn(engine=self._name, reached=True))

    async def inherit(self) -> None:
        """Take over what an earlier rollout actor told it.

        Raises:
            EngineUnavailable: that cannot be read.
        """
        await self._memory.inherit()

    async def give_back(self) -> None:
        """Have it give back everything. No request of ours is there; what an earlier actor left there is aborted.

        Raises:
            EngineError: it did not.
        """
        if self.room is Stage.NOTHING:
            return
        await self._until_idle()
        await self._move(Stage.NOTHING, self._memory.release)

    async def take_weights(self) -> None:
        """Have it take room for weights, which are to be loaded then.

        Raises:
            EngineError: it did not.
        """
        await self._move(Stage.WEIGHTS, partial(self._memory.resume, "weights"))

    async def take_rest(self) -> None:
        """Have it take all other memory.

        Raises:
            EngineError: it did not.
        """
        if self.room is not Stage.EVERYTHING:
            await self._move(Stage.EVERYTHING, self._memory.resume)

    async def _until_idle(self) -> None:
        """A scheduler that is told while it is not idle dies; its last answer comes before it is."""
        while True:
            try:
                await self._client.flush_cache(self._url, IDLE_S)
            except RequestRefused as error:
                log.warning("engine_not_idle", engine=self._name, reason=str(error))
                await self._client.abort(self._url, None)
            except EngineSilent:  # its agent kills what hangs
                log.warning("engine_silent", engine=self._name)
            else:
                return

    async def _move(self, stage: Stage, move: Callable[[], Awaitable[None]]) -> None:
        if self._pid and not is_there(self._pid):
            raise EngineUnavailable(f"{self._url}: its process has ended, and another one may listen there")
        begin, before = time.perf_counter(), self._bytes()
        await move()
        took_s, after = time.perf_counter() - begin, self._bytes()
        log.info("engine_memory_moved", engine=self._name, to=stage.name.lower(), took_s=took_s)
        self._moved[stage] = EngineTurn(
            engine=self._name, reached=True, took_s=took_s, bytes_before=before, bytes_after=after
        )

    def _bytes(self) -> int | None:
        return anonymous_bytes(self._pid) if self._is_shown else None
