"""The engines of a rollout actor: who is up, who holds which weights, who is behind the router."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import structlog

from actors.rollout.engines.router import Listing
from actors.rollout.engines.weights.disk import Updater
from actors.rollout.sglang.client import EngineError, EngineUnavailable, Http
from messages import WeightsAnnounced

log = structlog.get_logger()

RETRY_S = 1.0
POLL_S = 0.1  # while an engine or the router starts; neither tells when it is up
REGISTER_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 5.0
REFUSED_PATIENCE_S = 60.0  # newer weights, or a trainer's restart, may help


class WeightsMismatch(EngineError):
    """An engine's checksum is not that of the announcement."""


@dataclass
class Engine:
    """One engine behind its address; a restarted one is another Engine."""

    name: str
    url: str
    version: int = 0  # confirmed by checksum; 0: none yet
    updating: bool = False
    routed: bool = False  # the router may know it
    admitted: bool = False  # current and registered at the router
    moving: anyio.Lock = field(default_factory=anyio.Lock)  # in or out of the router, not both at a time


class Fleet:
    """Keeps engines current and registered. Generation waits here until the engines it may use are confirmed.

    A task of its own looks after each engine: one that hangs holds up no other. A lost Fleet loses nothing: it is
    rebuilt from the addresses on the bus and the newest announcement in the log.
    """

    def __init__(self, http: Http, updater: Updater) -> None:
        self._http = http
        self._listing = Listing(http)
        self._updater = updater
        self._engines: dict[str, Engine] = {}
        self._router: str | None = None
        self._wanted: WeightsAnnounced | None = None
        self._changed = anyio.Condition()
        self._check: anyio.Event | None = None  # of all admitted engines, under way

    @property
    def router(self) -> str:
        """URL of the router; only valid after wait_ready."""
        assert self._router is not None
        return self._router

    @property
    def engine_urls(self) -> list[str]:
        """All engines whose address is known."""
        return [engine.url for engine in self._engines.values()]

    @property
    def version(self) -> int:
        """Newest version that all engines confirmed that the router may ask; 0 while none is admitted."""
        if not self._admitted():
            return 0
        return min(engine.version for engine in self._engines.values() if engine.routed or engine.admitted)

    @property
    def wanted_version(self) -> int:
        """The version that the engines are to hold; 0: none was announced yet."""
        return self._wanted.version if self._wanted is not None else 0

    def num_admitted(self) -> int:
        """Engines that may get requests."""
        return len(self._admitted())

    def waits_for(self) -> str:
        """What keeps requests from being sent, for people; empty when nothing does."""
        if self._router is None:
            return "the router"
        if self._wanted is None:
            return "the first weights"
        behind = [engine.name for engine in self._engines.values() if self._is_behind(engine)]
        if not self._admitted():
            return f"an engine, of {len(self._engines)} that are known"
        return f"weights {self.wanted_version} at {', '.join(behind)}" if behind else ""

    async def wait_ready(self, min_version: int, *, unless: Callable[[], bool]) -> bool:
        """Wait until the router and at least one engine are up and every admitted one is at min_version.

        Returns:
            False when `unless` came true first; it is looked at on every `notify`.
        """
        if self._holds(min_version) and not unless():
            return True
        async with self._changed:
            while not unless():
                if self._holds(min_version):
                    return True
                await self._changed.wait()
            return False

    def _holds(self, min_version: int) -> bool:
        return self._router is not None and self.version >= max(min_version, 1)

    async def next_version(self, after: int) -> int:
        """Wait until all admitted engines have confirmed a version above `after`; return it."""
        async with self._changed:
            while self.version <= after:
                await self._changed.wait()
            return self.version

    async def notify(self) -> None:
        """Let the waiting look again."""
        async with self._changed:
            self._changed.notify_all()

    async def run_router(self, url: str) -> None:
        """Send requests to a router: wait until it answers and knows no engine, and again when it is lost.

        One that outlived an earlier rollout actor still knows that one's engines, whatever weights they hold. Runs for
        ever, in a task that is cancelled when the router's address changes.
        """
        while True:
            self._router = None
            for engine in self._engines.values():
                engine.admitted = engine.routed = False
            await self._wait_until(lambda: self._listing.free_of(url, None))
            self._router = url
            await self.notify()
            async with self._changed:
                while self._router == url:
                    await self._changed.wait()

    async def run_engine(self, name: str, url: str) -> None:
        """Keep one engine admitted: wait for it, give it the current weights, register it, and again when it is lost.

        Runs for ever, in a task that is cancelled when the engine's address changes.

        Raises:
            WeightsMismatch, RequestRefused: it has refused the weights for long, and no other engine has taken any.
        """
        old = self._engines.get(name)
        engine = self._engines[name] = Engine(name=name, url=url)
        if old is not None:
            await self._forget(old)
        refused_since = math.inf
        while True:
            await self._wait_until(lambda: self._is_up(url))
            try:
                await self._admit(engine)
            except EngineError as error:
                log.warning("engine_not_admitted", engine=name, error=str(error))
                away = isinstance(error, EngineUnavailable)
                refused_since = math.inf if away else min(refused_since, anyio.current_time())
                if anyio.current_time() - refused_since > REFUSED_PATIENCE_S and not self._admitted():
                    raise
                await anyio.sleep(RETRY_S)
                continue
            refused_since = math.inf
            log.info("engine_admitted", engine=name, url=url, weight_version=engine.version)
            await self.notify()
            await self._keep_current(engine)

    async def want(self, announced: WeightsAnnounced) -> None:
        """Have every engine take these weights as soon as it can; returns at once. The last call counts."""
        self._wanted = announced
        await self.notify()

    async def report_unavailable(self) -> None:
        """A request failed: find out who is not as it was, router or engine, and ask it no more until it is.

        Many requests fail at the same time: all wait for one look.
        """
        if self._check is not None:
            await self._check.wait()
            return
        self._check = anyio.Event()
        try:
            router = self._router
            if router is not None and not await self._listing.answers(router) and self._router == router:
                log.warning("router_lost", url=router)
                self._router = None
            async with anyio.create_task_group() as group:
                for engine in self._admitted():
                    group.start_soon(self._check_or_expel, engine)
        finally:
            self._check.set()
            self._check = None
        await self.notify()

    async def _check_or_expel(self, engine: Engine) -> None:
        if not await self._is_intact(engine):
            log.warning("engine_lost", engine=engine.name, url=engine.url)
            await self._expel(engine)

    async def _is_intact(self, engine: Engine) -> bool:
        """Whether an admitted engine answers, holds the weights that it confirmed, and is known to the router."""
        if not engine.updating and not await self._http.ready(engine.url):
            return False
        try:
            version = await self._http.weight_version(engine.url)
        except EngineError:
            return False
        if version != str(engine.version) and engine.version and not engine.updating:
            return False
        return self._router is None or not await self._listing.lacks(self._router, engine.url)

    async def _expel(self, engine: Engine) -> None:
        """Ask it no more: neither we nor, until it is admitted again, the router."""
        engine.admitted = False
        async with engine.moving:
            if engine in self._admitted():  # brought back by then
                return
            await self._forget(engine)
            engine.routed = False

    def _admitted(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.admitted]

    async def _is_up(self, url: str) -> bool:
        """Whether an engine may be given weights. One that an earlier actor paused before it died goes on."""
        if await self._http.ready(url):
            return True
        try:
            await self._http.proceed(url)
        except EngineError:
            return False
        return await self._http.ready(url)

    async def _admit(self, engine: Engine) -> None:
        """Bring an engine to the wanted weights, register it, and count it in while they still are the wanted ones."""
        async with engine.moving:
            engine.version = 0  # it may have begun anew
            while not engine.admitted:
                await self._bring_current(engine)
                await self._register(engine)
                engine.admitted = not self._is_behind(engine)

    async def _register(self, engine: Engine) -> None:
        engine.routed = True
        with anyio.move_on_after(REGISTER_TIMEOUT_S) as scope:
            await self._wait_until(lambda: self._registered_or_behind(engine))
        if scope.cancelled_caught:
            await self._forget(engine)
            engine.routed = False
            raise EngineUnavailable(f"the router did not take {engine.url} within {REGISTER_TIMEOUT_S:.0f} s")

    async def _registered_or_behind(self, engine: Engine) -> bool:
        if self._is_behind(engine):
            return True
        return self._router is not None and await self._listing.has(self._router, engine.url)

    async def _keep_current(self, engine: Engine) -> None:
        """Give an admitted engine newer weights whenever such are wanted, until it is no longer admitted."""
        while engine.admitted:
            async with self._changed:
                while engine.admitted and not self._is_behind(engine):
                    await self._changed.wait()
            if not engine.admitted:
                return
            try:
                await self._bring_current(engine)
            except EngineError as error:
                log.warning("weights_refused", engine=engine.name, weight_version=self.wanted_version, error=str(error))
                await self._expel(engine)
            await self.notify()

    def _is_behind(self, engine: Engine) -> bool:
        return engine.version < self.wanted_version

    async def _bring_current(self, engine: Engine) -> None:
        """Give an engine the wanted weights, and again if others are wanted by then."""
        while self._wanted is not None and self._is_behind(engine):
            announced = self._wanted
            engine.updating = True
            try:
                await self._updater.update(engine.url, announced)
                checksum = await self._http.checksum(engine.url)
                if checksum != announced.checksum:
                    raise WeightsMismatch(f"{engine.name} holds {checksum}, announced was {announced.checksum}")
                engine.version = announced.version
            finally:
                engine.updating = False

    async def _forget(self, engine: Engine) -> None:
        """Have the router forget an engine. If that takes too long, what it still answers is seen by its version."""
        router = self._router
        if router is None:
            return
        with anyio.move_on_after(REMOVE_TIMEOUT_S) as scope:
            await self._wait_until(lambda: self._listing.free_of(router, engine.url))
        if scope.cancelled_caught:
            log.warning("worker_not_removed", url=engine.url)

    @staticmethod
    async def _wait_until(true: Callable[[], Awaitable[bool]]) -> None:
        while not await true():  # noqa: ASYNC110 - the servers have no way to tell that they are up
            await anyio.sleep(POLL_S)
