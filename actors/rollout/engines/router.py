"""SGLang's router: dispatch by it, and the registration of engines at it."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
import structlog

from actors.rollout.engines.dispatch import Dispatch, E
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import RouterWorker
from actors.rollout.sglang.errors import EngineError, EngineUnavailable

log = structlog.get_logger()

ASK_AGAIN_S: Final = 5.0
POLL_S: Final = 0.1  # while an engine or the router starts; neither signals when it is up
REGISTER_TIMEOUT_S: Final = 60.0
REMOVE_TIMEOUT_S: Final = 5.0


class ThroughRouter:
    """Sends requests to the router; adds, removes and queries its engines.

    A router accepts a change at once and applies it later, in any order, by the engine's URL. A duplicate removal could
    therefore remove the engine after it has come back. So each change is requested once, and repeated only after
    ASK_AGAIN_S.
    """

    first_url: str | None = None

    def __init__(
        self,
        client: SglangClient,
        engine_behind: Callable[[str], str] = lambda _: "",
        *,
        run: str | None = None,
        engines: Collection[str] = (),
    ) -> None:
        """Use a router that the run started, or an external one.

        Args:
            client: for the router.
            engine_behind: returns the name of the engine that a weight label was given to; empty: unknown.
            run: name of the run, for an external router; other engines that it lists stay there. None: its own router.
            engines: URLs of external engines that serve the run.
        """
        self._client = client
        self._engine_behind = engine_behind
        self._run = run
        self._external_engines = frozenset(engines)
        self.waits_for = "the router"
        self._num_named = 0  # requests sent past the router, for round-robin
        self._asked_at: dict[tuple[str, str], float] = {}  # by router and requested change

    async def answers(self, router: str) -> bool:
        """Whether the router responds with its worker list."""
        try:
            await self._client.workers(router)
        except EngineError:
            return False
        return True

    async def has(self, router: str, engine: str) -> bool:
        """Whether the router lists an engine as healthy; adds the engine if it is missing."""
        try:
            listed = [worker for worker in await self._client.workers(router) if worker.url == engine]
            if not listed:
                await self._once(router, engine, lambda: self._client.add_worker(router, engine))
        except EngineError:
            return False
        return any(worker.is_healthy for worker in listed)

    async def lacks(self, router: str, engine: str) -> bool:
        """Whether the router responds and does not list an engine."""
        try:
            return all(worker.url != engine for worker in await self._client.workers(router))
        except EngineError:
            return False

    async def free_of(self, router: str, engine: str | None) -> bool:
        """Whether the router responds without listing an engine, or any engine if None; removes those that it lists.

        An external router may list engines of others, to which requests could go: they stay, and the run waits.
        """
        try:
            found = [worker for worker in await self._client.workers(router) if engine is None or worker.url == engine]
            others = [] if engine is not None else [worker.url for worker in found if not self._is_ours(worker)]
            of_others = f" {router}, which lists engines of others: {', '.join(others)}" if others else ""
            self.waits_for = f"the router{of_others}"
            for worker in found if not others else ():
                self._asked_at.pop((router, worker.url), None)  # listed now, so a later add must be requested anew
                await self._once(router, worker.id, lambda worker=worker: self._client.remove_worker(router, worker))
        except EngineError:
            return False
        return not found

    def engine_of(self, named: str, label: str) -> str:
        """Return the engine of a weight label: the router does not report which engine has a request."""
        return self._engine_behind(label) or named

    def may_hold(self, engine: str, engines: Mapping[str, E]) -> list[E]:
        """Return all engines: the router may have sent the request to another one before its first token."""
        return list(engines.values())

    def may_send(self, versions: Sequence[int], oldest: int, min_version: int) -> bool:
        """Whether every engine that the router may choose holds the version."""
        return oldest >= min_version

    def choose(self, engines: Sequence[E], prompt: str, *, failed: str | None, by_name: bool) -> E | None:
        """Choose an engine, in turn, if the router cannot pass a request on, or an engine failed to answer it.

        The router does not report which engine answered, and drops `return_sampling_mask` (0.3.2).
        """
        if not by_name and (failed is None or len(engines) < 2):
            return None
        others = [engine for engine in engines if engine.name != failed] or engines
        self._num_named += 1
        return others[self._num_named % len(others)] if others else None

    def _is_ours(self, worker: RouterWorker) -> bool:
        return self._run is None or worker.run == self._run or worker.url in self._external_engines

    async def _once(self, router: str, what: str, ask: Callable[[], Awaitable[None]]) -> None:
        """Request a change, unless the router accepted an equal request within the last ASK_AGAIN_S."""
        now = time.monotonic()
        self._asked_at = {key: at for key, at in self._asked_at.items() if now - at < ASK_AGAIN_S}
        if (router, what) in self._asked_at:
            return
        self._asked_at[router, what] = now
        try:
            await ask()
        except EngineError:
            self._asked_at.pop((router, what), None)
            raise


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
                    if not self._accepts_requests():
                        await self.leave()  # a concurrent check found it lost, and left this to us
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
