"""How an engine takes new weights, and what its running requests do meanwhile."""

from collections.abc import Awaitable, Callable
from typing import Final, Literal

import anyio
import structlog

from actors.rollout.sglang.client import ADMIN_TIMEOUT_S, SglangClient
from actors.rollout.sglang.errors import EngineError
from messages import WeightsAnnounced
from runtime.bus.background import beside

log = structlog.get_logger()

Mode = Literal["drain", "abort", "retract", "in_place"]
Interrupt = Callable[[str], Awaitable[None]]

CONTINUE_TRIES: Final = 3


class Updater:
    """Updates engines by the recipe's `on_weight_update`.

    - drain: the engine ends its running requests first.
    - abort: training requests are interrupted there, and go on from their tokens under the new weights.
    - retract: they are frozen, and computed anew from their tokens under the new weights.
    - in_place: they are frozen, and go on with the keys and values of the old weights.
    """

    def __init__(self, client: SglangClient, mode: Mode) -> None:
        self._client = client
        self._mode = mode
        self._interrupt: Interrupt | None = None

    def interrupt_by(self, interrupt: Interrupt) -> None:
        """Say what ends the training requests of an engine, by its URL, for as long as it is not cancelled."""
        self._interrupt = interrupt

    async def update(self, url: str, announced: WeightsAnnounced) -> None:
        """Have an engine load weights. Whatever becomes of it, the engine is not left paused by us.

        Raises:
            EngineError: it did not.
        """
        if self._mode == "drain":
            await self._load(url, announced)
        elif self._mode == "abort":
            async with beside(lambda: self._keep_interrupting(url)):
                await self._load(url, announced)
        else:
            await self._load_paused(url, announced)

    async def _keep_interrupting(self, url: str) -> None:
        assert self._interrupt is not None, "the generator says how at the start"
        await self._interrupt(url)

    async def _load_paused(self, url: str, announced: WeightsAnnounced) -> None:
        try:
            await self._client.pause(url, self._mode)
            # what a frozen request computed under the old weights is in use and cannot be thrown away
            await self._load(url, announced, flush_cache=self._mode != "in_place")
        finally:
            with anyio.move_on_after(CONTINUE_TRIES * ADMIN_TIMEOUT_S, shield=True):
                await self._proceed(url)

    async def _load(self, url: str, announced: WeightsAnnounced, *, flush_cache: bool = True) -> None:
        await self._client.update_weights(url, announced.path, announced.version, flush_cache=flush_cache)

    async def _proceed(self, url: str) -> None:
        """End a pause. An engine that cannot be told is told before it is admitted again."""
        for _ in range(CONTINUE_TRIES):
            try:
                await self._client.proceed(url)
            except EngineError as error:
                log.warning("engine_still_paused", url=url, error=str(error))
            else:
                return
