"""One engine behind its address: up or not, current or behind, known to the router, admitted to requests."""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from actors.rollout.engines.router import RouterWorkers
from actors.rollout.engines.weights.proof import WeightsMismatch
from actors.rollout.engines.weights.prover import Prover
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from messages import WeightsAnnounced

log = structlog.get_logger()

POLL_S = 0.1  # while an engine or the router starts; neither tells when it is up
REGISTER_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 5.0


class FleetTarget:
    """What all engines of a fleet are to hold, and the router that is to know them; who waits is told of changes."""

    def __init__(self) -> None:
        self.weights: WeightsAnnounced | None = None
        self.router: str | None = None  # its URL; None: it is not up
        self.changed = anyio.Condition()

    @property
    def version(self) -> int:
        """The version that the engines are to hold; 0: none was announced yet."""
        return self.weights.version if self.weights is not None else 0

    async def notify(self) -> None:
        """Let the waiting look again."""
        async with self.changed:
            self.changed.notify_all()


class Engine:
    """One engine behind its address; a restarted one is another Engine."""

    def __init__(self, name: str, url: str, client: SglangClient, prover: Prover, target: FleetTarget) -> None:
        self.name = name
        self.url = url
        self.version = 0  # proven; 0: none yet
        self._label = ""  # of the proven weights
        self.routed = False  # the router may know it
        self.admitted = False  # current and registered at the router
        self._updating = False
        self._moving = anyio.Lock()  # in or out of the router, not both at a time
        self._client = client
        self._workers = RouterWorkers(client)
        self._prover = prover
        self._target = target

    @property
    def is_behind(self) -> bool:
        """Whether it is to have newer weights."""
        return self.version < self._target.version

    async def is_up(self) -> bool:
        """Whether it may be given weights. One that an earlier actor paused before it died goes on."""
        if await self._client.ready(self.url):
            return True
        try:
            await self._client.proceed(self.url)
        except EngineError:
            return False
        return await self._client.ready(self.url)

    async def admit(self) -> None:
        """Bring it to the target weights, register it, and count it in while they still are the target.

        Raises:
            EngineError: it did not take the weights, or the router did not take it.
        """
        async with self._moving:
            self.version = 0  # it may have begun anew
            try:
                while not self.admitted:
                    await self._bring_current()
                    await self._register()
                    self.admitted = not self.is_behind
            except EngineError:
                if self.routed:  # else all versions would wait for its own
                    await self._unregister()
                raise

    async def keep_current(self) -> None:
        """Give it newer weights whenever such are the target, until it is no longer admitted."""
        while self.admitted:
            async with self._target.changed:
                while self.admitted and not self.is_behind:
                    await self._target.changed.wait()
            if not self.admitted:
                return
            try:
                await self._bring_current()
            except EngineError as error:
                self.log_refusal(error)
                await self._expel()
                if isinstance(error, WeightsMismatch):
                    await self._prover.clear(self.url)
            await self._target.notify()

    def log_refusal(self, error: EngineError) -> None:
        """Say why it does not work under the newest weights."""
        log.warning("weights_refused", engine=self.name, weight_version=self._target.version, reason=str(error))

    async def check_or_expel(self) -> None:
        """Ask an admitted engine no more unless it is as it was."""
        if not await self._is_intact():
            log.warning("engine_lost", engine=self.name, url=self.url)
            await self._expel()

    async def forget(self) -> None:
        """Have the router forget it. If that takes too long, what it still answers is seen by its version."""
        router = self._target.router
        if router is None:
            return
        with anyio.move_on_after(REMOVE_TIMEOUT_S) as scope:
            await wait_until(lambda: self._workers.free_of(router, self.url))
        if scope.cancelled_caught:
            log.warning("worker_not_removed", url=self.url)

    async def _is_intact(self) -> bool:
        """Whether it answers, holds the weights that it confirmed, and is known to the router."""
        if not self._updating and not await self._client.ready(self.url):
            return False
        try:
            label = await self._client.weight_version(self.url)
        except EngineError:
            return False
        if label != self._label and self.version and not self._updating:
            return False
        return self._target.router is None or not await self._workers.lacks(self._target.router, self.url)

    async def _expel(self) -> None:
        """Ask it no more: neither we nor, until it is admitted again, the router."""
        self.admitted = False
        async with self._moving:
            if not self.admitted:  # not brought back by then
                await self._unregister()

    async def _unregister(self) -> None:
        await self.forget()
        self.routed = False
        await self._target.notify()  # who waits for a version waits for this engine's no more

    async def _register(self) -> None:
        self.routed = True
        with anyio.move_on_after(REGISTER_TIMEOUT_S) as scope:
            await wait_until(self._registered_or_behind)
        if scope.cancelled_caught:
            raise EngineUnavailable(f"the router did not take {self.url} within {REGISTER_TIMEOUT_S:.0f} s")

    async def _registered_or_behind(self) -> bool:
        if self.is_behind:
            return True
        return self._target.router is not None and await self._workers.has(self._target.router, self.url)

    async def _bring_current(self) -> None:
        """Give it the target weights, and again if others are the target by then."""
        while self.is_behind and (announced := self._target.weights) is not None:
            self._updating = True
            try:
                first = self.version == 0
                self._label = await self._prover.bring(self.name, self.url, announced, first=first)
                self.version = announced.version
            finally:
                self._updating = False


async def wait_until(true: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes."""
    while not await true():  # noqa: ASYNC110 - the servers have no way to tell that they are up
        await anyio.sleep(POLL_S)
