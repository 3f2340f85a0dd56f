"""An engine's place at the router, which sends requests to the engines that it knows."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import structlog

from actors.rollout.engines.router import RouterWorkers
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.errors import EngineUnavailable

log = structlog.get_logger()

POLL_S: Final = 0.1  # while an engine or the router starts; neither tells when it is up
REGISTER_TIMEOUT_S: Final = 60.0
REMOVE_TIMEOUT_S: Final = 5.0


class Registration:
    """Has the router know one engine while it may be asked, unless it is set apart.

    Args:
        url: of the engine.
        workers: of the router; one for all engines of a fleet.
        target: has the router, and tells who waits of changes.
        is_asked: whether requests may be sent to the engine.
    """

    def __init__(self, url: str, workers: RouterWorkers, target: FleetTarget, is_asked: Callable[[], bool]) -> None:
        self.is_known = False  # the router may know it
        self.moving = anyio.Lock()  # in or out of the router, not both at a time; who has it calls `enter` and `leave`
        self._num_apart = 0  # reasons for which the router does not know it: a request alone, its turn to be updated
        self._url = url
        self._workers = workers
        self._target = target
        self._is_asked = is_asked

    @property
    def is_apart(self) -> bool:
        """Whether the router is not to know it for now, though it may be asked."""
        return self._num_apart > 0

    async def set_apart(self) -> None:
        """Have the router send nothing there; what is there goes on."""
        self._num_apart += 1
        async with self.moving:
            await self.leave()

    async def join(self) -> None:
        """End that; cut off, or if the router does not take it, the next look at it finds it missing there."""
        if self._is_asked() and self._num_apart == 1:  # until the router knows it that is no reason to count it as lost
            with anyio.move_on_after(REGISTER_TIMEOUT_S, shield=True):
                async with self.moving:
                    self.is_known = True
                    await wait_until(self._entered_or_lost)
                    if not self._is_asked():  # who found that left it to us to take it out again
                        await self.leave()
        self._num_apart -= 1
        await self._target.notify()

    @asynccontextmanager
    async def apart(self) -> AsyncGenerator[None]:
        """In the block the router sends nothing there. After its failure neither: whoever handles that goes on."""
        await self.set_apart()
        try:
            yield
        except BaseException:
            self._num_apart -= 1
            raise
        await self.join()

    async def enter(self, unless: Callable[[], bool]) -> None:
        """Wait until the router knows it, or `unless` holds; called with `moving` taken.

        Raises:
            EngineUnavailable: the router does not take it.
        """

        async def entered() -> bool:
            return unless() or await self._is_healthy_there()

        self.is_known = True
        with anyio.move_on_after(REGISTER_TIMEOUT_S) as scope:
            await wait_until(entered)
        if scope.cancelled_caught:
            raise EngineUnavailable(f"the router did not take {self._url} within {REGISTER_TIMEOUT_S:.0f} s")

    async def leave(self) -> None:
        """Have the router forget it, and who waits for a version wait for this engine's no more."""
        await self.forget()
        self.is_known = False
        await self._target.notify()

    async def leave_unless_asked(self) -> None:
        """The same, unless it may be asked again by then, or is apart anyway."""
        async with self.moving:
            if not self._is_asked() and not self.is_apart:
                await self.leave()

    async def forget(self) -> None:
        """Have the router forget it. If that takes too long, what it still answers is seen by its version."""
        router = self._target.router
        if router is None:
            return
        with anyio.move_on_after(REMOVE_TIMEOUT_S) as scope:
            await wait_until(lambda: self._workers.free_of(router, self._url))
        if scope.cancelled_caught:
            log.warning("worker_not_removed", url=self._url)

    async def is_missing(self) -> bool:
        """Whether the router answers and does not know it, though it is to."""
        if self.is_apart or self._target.router is None:
            return False
        return await self._workers.lacks(self._target.router, self._url) and not self.is_apart  # it may be by now

    async def _entered_or_lost(self) -> bool:
        return not self._is_asked() or await self._is_healthy_there()

    async def _is_healthy_there(self) -> bool:
        return self._target.router is not None and await self._workers.has(self._target.router, self._url)


async def wait_until(true: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes."""
    while not await true():  # noqa: ASYNC110 - the servers have no way to tell that they are up
        await anyio.sleep(POLL_S)
