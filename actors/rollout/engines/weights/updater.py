"""How an engine takes new weights, and what its running requests do meanwhile."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final, Literal

import anyio
import structlog

from actors.rollout.engines.weights.pauses import Pauses
from actors.rollout.engines.weights.receiving import Receiver
from actors.rollout.engines.weights.session import Part
from actors.rollout.engines.weights.tensors import Hashes
from actors.rollout.sglang.client import ADMIN_TIMEOUT_S, Load, SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable
from messages import WeightsAnnounced
from runtime.bus.background import beside

log = structlog.get_logger()

Mode = Literal["drain", "abort", "retract", "in_place"]
Interrupt = Callable[[str], Awaitable[None]]
Hold = Callable[[], AbstractAsyncContextManager[None]]

CONTINUE_TRIES: Final = 3
CLEAR_S: Final = 2.5  # of interrupting what runs under wrong weights: it is repeated once a second

IDLE_POLL_S: Final = 0.05

Expected = Mapping[str, Sequence[Hashes]]  # what engines will say of each rank, by a layout's key
Look = Callable[[str, Expected], Awaitable[None]]  # is given the checksum of what was loaded


class Updater:
    """Updates engines by the recipe's `on_weight_update`.

    - drain: the engine ends its running requests first.
    - abort: training requests are interrupted there, and go on from their tokens under the new weights.
    - retract: they are frozen, and computed anew from their tokens under the new weights.
    - in_place: they are frozen, and go on with the keys and values of the old weights.

    Args:
        client: for the engines.
        mode: one of these.
        pauses: where it keeps whom it has paused; none: in memory.
    """

    def __init__(
        self, client: SglangClient, mode: Mode, pauses: Pauses | None = None, *, timeout_s: float = 600.0
    ) -> None:
        self._client = client
        self._mode: Mode = mode
        self._timeout_s = timeout_s
        self._interrupt: Interrupt | None = None
        self._hold: Hold = nullcontext
        self._pauses = Pauses() if pauses is None else pauses
        self._receiver = Receiver(client, timeout_s)

    def interrupt_by(self, interrupt: Interrupt) -> None:
        """Say what ends the training requests of an engine, by its URL, for as long as it is not cancelled."""
        self._interrupt = interrupt

    def hold_by(self, hold: Hold) -> None:
        """Say what keeps new requests from being sent, in its block."""
        self._hold = hold

    async def update(
        self, url: str, announced: WeightsAnnounced, label: str, look: Look | None = None, part: Part | None = None
    ) -> float:
        """Have an engine load weights.

        Args:
            url: of the engine.
            announced: what it is to load.
            label: what it is to call it.
            look: done once they are loaded, while the engine generates nothing.
            part: in the session that brings them; none: they are in files.

        Returns:
            Seconds that it began no request: from its pause, or since new ones were held back or wait in it for the
            load, until it goes on. With `drain` those that run end meanwhile.

        Raises:
            EngineError: it did not load them, `look` raised it, or it is paused and cannot be told to go on.
        """
        if part is not None:
            await part.next()  # SessionPrepared: until then it generates
        begin = time.perf_counter()
        if part is None:
            await self._update_from_files(url, announced, label, look)
        else:
            await self._update_in_session(url, part, label, look)
        if self.is_paused(url):
            raise EngineUnavailable(f"{url}: was paused to take weights, and cannot be told to go on")
        return time.perf_counter() - begin

    async def _update_from_files(self, url: str, announced: WeightsAnnounced, label: str, look: Look | None) -> None:
        checksum = announced.checksum
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                # what a frozen request computed under the old weights is in use and cannot be thrown away
                await self._client.update_weights(url, announced.path, label, flush_cache=self._mode == "retract")
                if look is not None:
                    await look(checksum, {})
            return
        await self._load_unpaused(url, announced, label)
        if look is not None:
            async with self._paused(url, "in_place"):
                await look(checksum, {})

    async def _update_in_session(self, url: str, part: Part, label: str, look: Look | None) -> None:
        async with self._stopped(url):
            try:
                finished = await self._receiver.receive(url, part, label)
                if self._mode != "in_place":
                    await self._client.flush_cache(url, 0.0)
                if look is not None:
                    await look(finished.checksum, finished.expected)
            except EngineError as error:
                part.fail(str(error))  # the trainer waits; to end a pause takes long where an engine hangs
                raise

    @asynccontextmanager
    async def _stopped(self, url: str) -> AsyncGenerator[None]:
        """In the block an engine generates nothing. What came to it all the same is computed anew after it."""
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                yield
            return
        async with self._hold():
            if self._mode == "drain":
                await self._until_idle(url)
            else:
                async with beside(lambda: self._keep_interrupting(url)):
                    await self._until_idle(url)
            async with self._paused(url, "retract"):
                yield

    async def _until_idle(self, url: str) -> None:
        """Wait until an engine has no requests; new ones are held back.

        Raises:
            EngineSilent: it still has some, or does not say.
        """
        with anyio.move_on_after(self._timeout_s):
            while not is_idle(await self._client.loads(url)):  # noqa: ASYNC110 - no server tells when it is
                await anyio.sleep(IDLE_POLL_S)
            return
        raise EngineSilent(f"{url}: its requests did not end within {self._timeout_s:g} s")

    def is_paused(self, url: str) -> bool:
        """Whether we paused an engine, or our predecessor did, and it could not be told to go on."""
        return url in self._pauses

    async def proceed(self, url: str) -> None:
        """End a pause of an engine, if there is one.

        Raises:
            EngineError: it could not be told.
        """
        await self._client.proceed(url)
        await self._pauses.end(url)

    async def forget_pause(self, url: str) -> None:
        """It says that it generates: whoever ended the pause, or whichever server that is."""
        await self._pauses.end(url)

    async def clear(self, url: str) -> None:
        """Interrupt the training requests of an engine."""
        with anyio.move_on_after(CLEAR_S):
            await self._keep_interrupting(url)

    async def _load_unpaused(self, url: str, announced: WeightsAnnounced, label: str) -> None:
        if self._mode == "drain":
            await self._client.update_weights(url, announced.path, label)
            return
        async with beside(lambda: self._keep_interrupting(url)):
            await self._client.update_weights(url, announced.path, label)

    async def _keep_interrupting(self, url: str) -> None:
        assert self._interrupt is not None, "the generator says how at the start"
        await self._interrupt(url)

    @asynccontextmanager
    async def _paused(self, url: str, mode: str) -> AsyncGenerator[None]:
        await self._pauses.begin(url)  # told or not: its answer may be lost
        tries = CONTINUE_TRIES
        try:
            await self._client.pause(url, mode)
            yield
        except EngineSilent:
            tries = 1  # it is looked at next, and killed when it makes no token; others wait for it meanwhile
            raise
        finally:
            with anyio.move_on_after(tries * ADMIN_TIMEOUT_S, shield=True):
                await self._proceed_surely(url, tries)

    async def _proceed_surely(self, url: str, tries: int) -> None:
        """End a pause. An engine that cannot be told is told before it is admitted again."""
        for _ in range(tries):
            try:
                await self.proceed(url)
            except EngineError as error:
                log.warning("engine_still_paused", url=url, error=str(error))
            else:
                return


def is_idle(loads: Sequence[Load] | None) -> bool:
    """Whether an engine says that it has nothing to do."""
    return loads is not None and not any(load.num_running_reqs or load.num_waiting_reqs for load in loads)
