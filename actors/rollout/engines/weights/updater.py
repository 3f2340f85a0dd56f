"""Weight updates of an engine, and the handling of its running requests meanwhile."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final, Literal

import anyio
import structlog

from actors.rollout.engines.weights.pauses import Pauses
from actors.rollout.engines.weights.receiving import Receiver
from actors.rollout.engines.weights.sync import SyncMember
from actors.rollout.sglang.client import ADMIN_TIMEOUT_S, Load, SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable
from messages import WeightsAnnounced
from runtime.bus.background import in_background

log = structlog.get_logger()

Mode = Literal["drain", "abort", "retract", "in_place"]
Interrupt = Callable[[str], Awaitable[None]]
Hold = Callable[[], AbstractAsyncContextManager[None]]

CONTINUE_TRIES: Final = 3
CLEAR_S: Final = 2.5  # time to interrupt requests on wrong weights; repeats once a second

IDLE_POLL_S: Final = 0.05

Check = Callable[[str], Awaitable[None]]  # receives the checksum of the loaded weights


class Updater:
    """Updates engines according to the recipe's `on_weight_update`.

    - drain: the engine finishes its running requests first.
    - abort: training requests are aborted and continue from their tokens under the new weights.
    - retract: requests are paused and recomputed from their tokens under the new weights.
    - in_place: requests are paused and continue with the KV cache of the old weights.

    Args:
        client: for the engines.
        mode: one of these.
        pauses: stores which engines are paused; None: in memory.
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
        """Set the callback that aborts an engine's training requests, by its URL, until it is cancelled."""
        self._interrupt = interrupt

    def hold_by(self, hold: Hold) -> None:
        """Set the context manager that blocks new requests."""
        self._hold = hold

    async def update(
        self,
        url: str,
        announced: WeightsAnnounced,
        label: str,
        check: Check | None = None,
        member: SyncMember | None = None,
    ) -> float:
        """Update an engine's weights.

        Args:
            url: of the engine.
            announced: the weights.
            label: the engine's new weight label.
            check: verification, called after the update while the engine generates nothing.
            member: its membership in the weight sync; None: the weights are in files.

        Returns:
            Seconds without new requests: from the pause, or from when new requests are blocked or queued, until it
                continues. With `drain`, running requests finish during that time.

        Raises:
            EngineError: the update or `check` failed, or the engine cannot be continued after its pause.
        """
        if member is not None:
            await member.next()  # WeightSyncPrepared: the engine generates until then
        begin = time.perf_counter()
        if member is None:
            await self._update_from_files(url, announced, label, check)
        else:
            await self._update_in_session(url, member, label, check)
        if self.is_paused(url):
            raise EngineUnavailable(f"{url}: still paused, because continuing it after the weight update failed")
        return time.perf_counter() - begin

    async def _update_from_files(self, url: str, announced: WeightsAnnounced, label: str, check: Check | None) -> None:
        checksum = announced.checksum
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                # the KV cache of paused requests is in use and cannot be flushed
                await self._client.update_weights(url, announced.path, label, flush_cache=self._mode == "retract")
                if check is not None:
                    await check(checksum)
            return
        await self._load_unpaused(url, announced, label)
        if check is not None:
            async with self._paused(url, "in_place"):
                await check(checksum)

    async def _update_in_session(self, url: str, member: SyncMember, label: str, check: Check | None) -> None:
        async with self._stopped(url):
            try:
                finished = await self._receiver.receive(url, member, label)
                if self._mode != "in_place":
                    await self._client.flush_cache(url, 0.0)
                if check is not None:
                    await check(finished.checksum)
            except EngineError as error:
                # report at once: the trainer waits, and ending the pause of a hung engine takes long
                member.fail(str(error))
                raise

    @asynccontextmanager
    async def _stopped(self, url: str) -> AsyncGenerator[None]:
        """Stop generation inside the block. Requests that still arrive are recomputed afterwards."""
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                yield
            return
        async with self._hold():
            if self._mode == "drain":
                await self._until_idle(url)
            else:
                async with in_background(lambda: self._keep_interrupting(url)):
                    await self._until_idle(url)
            async with self._paused(url, "retract"):
                yield

    async def _until_idle(self, url: str) -> None:
        """Wait until an engine has no requests, while new ones are blocked.

        Raises:
            EngineSilent: it still has some at the timeout, or does not report its load.
        """
        with anyio.move_on_after(self._timeout_s):
            while not is_idle(await self._client.loads(url)):  # noqa: ASYNC110 - no server tells when it is
                await anyio.sleep(IDLE_POLL_S)
            return
        raise EngineSilent(f"{url}: its requests did not end within {self._timeout_s:g} s (update_timeout_s)")

    def is_paused(self, url: str) -> bool:
        """Whether this or an earlier rollout actor paused an engine and has not been able to continue it."""
        return url in self._pauses

    async def proceed(self, url: str) -> None:
        """End an engine's pause, if there is one.

        Raises:
            EngineError: the call failed.
        """
        await self._client.proceed(url)
        await self._pauses.end(url)

    async def forget_pause(self, url: str) -> None:
        """Drop the note of a pause: the engine generates, whatever ended its pause."""
        await self._pauses.end(url)

    async def clear(self, url: str) -> None:
        """Interrupt the training requests of an engine."""
        with anyio.move_on_after(CLEAR_S):
            await self._keep_interrupting(url)

    async def _load_unpaused(self, url: str, announced: WeightsAnnounced, label: str) -> None:
        if self._mode == "drain":
            await self._client.update_weights(url, announced.path, label)
            return
        async with in_background(lambda: self._keep_interrupting(url)):
            await self._client.update_weights(url, announced.path, label)

    async def _keep_interrupting(self, url: str) -> None:
        assert self._interrupt is not None, "the generator sets it at the start"
        await self._interrupt(url)

    @asynccontextmanager
    async def _paused(self, url: str, mode: str) -> AsyncGenerator[None]:
        await self._pauses.begin(url)  # before the call: its response may be lost
        tries = CONTINUE_TRIES
        try:
            await self._client.pause(url, mode)
            yield
        except EngineSilent:
            tries = 1  # its health is checked next, and others wait for that meanwhile
            raise
        finally:
            with anyio.move_on_after(tries * ADMIN_TIMEOUT_S, shield=True):
                await self._proceed_surely(url, tries)

    async def _proceed_surely(self, url: str, tries: int) -> None:
        """End a pause, with retries. If all fail, the pause is ended before the engine is marked ready again."""
        for _ in range(tries):
            try:
                await self.proceed(url)
            except EngineError as error:
                log.warning("engine_still_paused", url=url, error=str(error))
            else:
                return


def is_idle(loads: Sequence[Load] | None) -> bool:
    """Whether an engine reports no running and no waiting requests."""
    return loads is not None and not any(load.num_running_reqs or load.num_waiting_reqs for load in loads)
