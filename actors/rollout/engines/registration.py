"""Registration of an engine at the router, which sends requests to its registered workers."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import structlog

from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.errors import EngineUnavailable

log = structlog.get_logger()

POLL_S: Final = 0.1  # while an engine or the router starts; neither signals when it is up
REGISTER_TIMEOUT_S: Final = 60.0
REMOVE_TIMEOUT_S: Final = 5.0


class Registration:
    """Keeps one engine registered at the router while it accepts requests and is not isolated.

    Args:
        url: of the engine.
        workers: registers engines; one for all engines of a fleet.
        target: has the router's URL, and notifies waiters of changes.
        accepts_requests: whether the engine accepts requests.
    """

    def __init__(self, url: str, workers: Dispatch, target: FleetTarget, accepts_requests: Callable[[], bool]) -> None:
        self.is_known = False  # the router may list it
        self.moving = anyio.Lock()  # serializes registering and unregistering; held during `enter` and `leave`
        self._num_apart = 0  # reasons to keep it unregistered: an isolation run, a rolling update
        self._url = url
        self._workers = workers
        self._target = target
        self._accepts_requests = accepts_requests

    @property
    def is_apart(self) -> bool:
        """Whether the engine is isolated: unregistered for now although it may accept requests."""
        return self._num_apart > 0

    async def set_apart(self) -> None:
        """Unregister the engine; its running requests go on."""
        self._num_apart += 1
        async with self.moving:
            await self.leave()

    async def join(self) -> None:
        """End the isolation: register the engine again.

        If that is cancelled or the router refuses it, the next health check finds the engine missing at the router.
        """
        # it stays isolated until it is registered, so that its absence at the router does not count as a loss
        if self._accepts_requests() and self._num_apart == 1:
            with anyio.move_on_after(REGISTER_TIMEOUT_S, shield=True):
                async with self.moving:
                    self.is_known = True
                    await wait_until(self._entered_or_lost)
                    if (
                        not self._accepts_requests()
                    ):  # a concurrent check found it lost and left the unregistering to this call
                        await self.leave()
        self._num_apart -= 1
        await self._target.notify()

    @asynccontextmanager
    async def apart(self) -> AsyncGenerator[None]:
        """Unregister the engine for the block. If the block raises, the caller re-registers it."""
        await self.set_apart()
        try:
            yield
        except BaseException:
            self._num_apart -= 1
            raise
        await self.join()

    async def enter(self, unless: Callable[[], bool]) -> None:
        """Wait until the router lists the engine as healthy, or `unless` holds. Call with `moving` held.

        Raises:
            EngineUnavailable: the router does not register it in time.
        """

        async def entered() -> bool:
            return unless() or await self._is_healthy_there()

        self.is_known = True
        with anyio.move_on_after(REGISTER_TIMEOUT_S) as scope:
            await wait_until(entered)
        if scope.cancelled_caught:
            raise EngineUnavailable(f"the router did not take {self._url} within {REGISTER_TIMEOUT_S:.0f} s")

    async def leave(self) -> None:
        """Unregister the engine, and stop its version from holding up waiters for newer ones."""
        await self.forget()
        self.is_known = False
        await self._target.notify()

    async def leave_unless_accepting(self) -> None:
        """Unregister the engine, unless it accepts requests again by then or is isolated anyway."""
        async with self.moving:
            if not self._accepts_requests() and not self.is_apart:
                await self.leave()

    async def forget(self) -> None:
        """Have the router remove the engine.

        If that takes too long, answers that still come from it are recognised by their weight version.
        """
        router = self._target.router
        if router is None:
            return
        with anyio.move_on_after(REMOVE_TIMEOUT_S) as scope:
            await wait_until(lambda: self._workers.free_of(router, self._url))
        if scope.cancelled_caught:
            log.warning("worker_not_removed", url=self._url)

    async def is_missing(self) -> bool:
        """Whether the router responds without listing the engine, although it should be registered."""
        if self.is_apart or self._target.router is None:
            return False
        # it may be isolated by now
        return await self._workers.lacks(self._target.router, self._url) and not self.is_apart

    async def _entered_or_lost(self) -> bool:
        return not self._accepts_requests() or await self._is_healthy_there()

    async def _is_healthy_there(self) -> bool:
        return self._target.router is not None and await self._workers.has(self._target.router, self._url)


async def wait_until(true: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition is true."""
    while not await true():  # noqa: ASYNC110 - the servers have no way to tell that they are up
        await anyio.sleep(POLL_S)
