"""The engines that get requests: when one may be sent and where, and what answers say of the engines."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
import structlog

from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.engine import Engine
from actors.rollout.engines.failures import RecentCrashes, RequestOutcomes
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.updates import UpdateTracker
from messages import EngineLoad, EngineState

log = structlog.get_logger()


async def no_others(*_: object) -> bool:
    """Answer for the engines of other rollout actors where there are none."""
    return False


class Serving:
    """The requests' side of a fleet. Requests wait here until their engines are verified.

    Args:
        engines: all engines of the fleet by name; the fleet changes it.
        target: of the engines; has the router's URL, and notifies waiters of changes.
        dispatch: chooses the engines of requests.
        updates: the weight updates, with the engines of weight labels.
        events: reports failed requests.
        crashes: of the engines.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        target: FleetTarget,
        dispatch: Dispatch,
        updates: UpdateTracker,
        events: RateLimitedEvents,
        crashes: RecentCrashes,
    ) -> None:
        self._engines = engines
        self._target = target
        self._dispatch = dispatch
        self.updates = updates
        self.events = events
        self.crashes = crashes
        self.outcomes = RequestOutcomes()
        self.is_held = False  # requests wait although engines are up
        self.others_answer: Callable[[], Awaitable[bool]] = no_others  # engines of other rollout actors
        self._check: anyio.Event | None = None  # a running health check of all engines that accept requests

    @property
    def router(self) -> str:
        """URL of the router; only valid after wait_ready."""
        assert self._target.router is not None
        return self._target.router

    @property
    def version(self) -> int:
        """Oldest verified version among the engines that the router may use; 0 while no engine is ready."""
        if not self.admitted():
            return 0
        return min(engine.version for engine in self._asked_or_known())

    def load_of(self, name: str) -> EngineLoad | None:
        """Load of the engine with this name; None: there is none."""
        engine = self._engines.get(name)
        return engine and engine.load

    def num_admitted(self) -> int:
        """Number of engines that accept requests."""
        return len(self.admitted())

    def is_held_by_any(self, version: int) -> bool:
        """Whether an engine that accepts requests holds this version or a newer one."""
        return any(engine.accepts_requests and engine.version >= version for engine in self._engines.values())

    async def wait_ready(self, min_version: int, *, unless: Callable[[], bool]) -> bool:
        """Wait until a request that needs a weight version may be sent.

        Returns:
            False if `unless` became true first; it is checked on every `notify`.
        """
        if self._holds(min_version) and not unless():
            return True
        async with self._target.changed:
            while not unless():
                if self._holds(min_version):
                    return True
                await self._target.changed.wait()
            return False

    def _holds(self, min_version: int) -> bool:
        if self.is_held or self._target.router is None or self._target.num_holds:
            return False
        versions = [engine.version for engine in self.admitted()]
        return self._dispatch.may_send(versions, self.version, max(min_version, 1))

    async def hold(self, held: bool) -> None:
        """Block new and repeated requests, or unblock them."""
        self.is_held = held
        await self._target.notify()

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Block new requests inside the context."""
        self._target.num_holds += 1
        try:
            yield
        finally:
            self._target.num_holds -= 1
            with anyio.CancelScope(shield=True):
                await self._target.notify()

    async def notify(self) -> None:
        """Make waiters check their conditions again."""
        await self._target.notify()

    def current_engines(self) -> list[Engine]:
        """Engines that accept requests and are not being updated."""
        return [engine for engine in self._engines.values() if engine.state is EngineState.CURRENT]

    def any_engine(self) -> Engine | None:
        """Return an engine that accepts requests, or None."""
        return next(iter(self.admitted()), None)

    def choose(self, min_version: int, prompt: str, *, failed: str | None, by_name: bool) -> Engine | None:
        """Choose the engine of a request after `wait_ready`; None: the router chooses.

        Args:
            min_version: of its weights.
            prompt: identifies its prompt, or its conversation.
            failed: name of the engine that failed to answer it; empty: unknown. None: none did.
            by_name: the router cannot pass it on.
        """
        engines = [engine for engine in self.admitted() if engine.version >= min_version]
        return self._dispatch.choose(engines, prompt, failed=failed, by_name=by_name)

    def holders(self, engine: str) -> list[str]:
        """Return the URLs of the engines that may hold a request; empty: the engine that has it is unknown."""
        return [each.url for each in self._dispatch.may_hold(engine, self._engines)]

    def holder(self, named: str, label: str) -> str:
        """Return the name of the engine that has a request; empty: unknown. Dispatch describes the arguments."""
        return self._dispatch.engine_of(named, label)

    def engine_behind(self, label: str) -> Engine | None:
        """Return the engine of a weight label, or the only engine that accepts requests."""
        engine = self.engine_of(label)
        admitted = self.admitted()
        return admitted[0] if engine is None and len(admitted) == 1 else engine

    @property
    def serves(self) -> bool:
        """Whether there is a router and at least one engine accepts requests."""
        return self._target.router is not None and bool(self.admitted())

    def admitted_names(self) -> str:
        """List the engines that accept requests with their URLs, for people."""
        return " or ".join(f"{engine.name} ({engine.url})" for engine in self.admitted())

    def refused_by(self) -> str:
        """Return why no engine accepts requests, if all engines are external; empty otherwise."""
        engines = self._engines.values()
        if self.admitted() or self.is_held or not engines or any(engine.ours for engine in engines):
            return ""
        return "; ".join(
            f"{engine.name} ({engine.url}) is {engine.state}: {engine.status.reason}" for engine in engines
        )

    def is_ours(self, url: str) -> bool:
        """Whether the run started the engine at a URL. An external engine also serves other clients."""
        return all(engine.ours for engine in self._engines.values() if engine.url == url)

    async def note_failure(self, engine: Engine, group: str, reason: str, *, counts: bool) -> None:
        """Record a failed request to a running engine.

        Args:
            engine: the engine.
            group: the request's prompt group.
            reason: of the failure.
            counts: the engine is to blame; False if it was only busy.
        """
        self.outcomes.failed(engine.name, group, reason, anyio.current_time(), counts=counts)
        await self._judge(engine)

    async def note_answer(self, label: str) -> None:
        """Record a usable answer under a weight label."""
        engine = self.engine_of(label)
        if engine is None:
            return
        self.outcomes.answered(engine.name, anyio.current_time())
        for other in self.admitted():
            await self._judge(other)

    async def _judge(self, engine: Engine) -> None:
        """Quarantine an engine that keeps failing while another engine answers well.

        If no other engine answers, restart it if the run started it; otherwise keep using it.
        """
        now = anyio.current_time()
        if (
            not self.outcomes.keeps_failing(engine.name, now)
            or not engine.accepts_requests
            or engine.registration.is_apart
        ):
            return
        others = [each.name for each in self.admitted() if each is not engine]
        reason = self.outcomes.reason(engine.name)
        answer = any(self.outcomes.answers(name) for name in others) or await self.others_answer()
        if not engine.shares_memory and answer:
            self.outcomes.forget(engine.name)
            await engine.quarantine(reason)
        elif engine.ours and all(self.outcomes.keeps_failing(name, now) for name in others):
            self.outcomes.forget(engine.name)
            await engine.condemn(reason)
        await self._target.notify()

    def engine_of(self, label: str) -> Engine | None:
        """Return the engine that a weight label was given to, if it still exists."""
        return self._engines.get(self.updates.engine_of(label))

    def note_token(self, label: str, sent_at: float) -> None:
        """Record a token under a weight label, of a request sent at `sent_at`: its engine is alive."""
        engine = self.engine_of(label)
        if engine is not None:
            engine.sign_at = anyio.current_time()
            engine.served_at = max(engine.served_at, sent_at)

    async def report_unavailable(self) -> None:
        """After a failed request, check the router and all engines, and stop using those that fail.

        Concurrent callers share one check.
        """
        if self._check is not None:
            await self._check.wait()
            return
        self._check = anyio.Event()
        try:
            router = self._target.router
            if router is not None and not await self._dispatch.answers(router) and self._target.router == router:
                log.warning("router_lost", url=router)
                self._target.router = None
            async with anyio.create_task_group() as group:
                for engine in self.admitted():
                    group.start_soon(engine.check_or_expel)
        finally:
            self._check.set()
            self._check = None
        await self._target.notify()

    def admitted(self) -> list[Engine]:
        """Return the engines that may get requests: they accept them and are not isolated."""
        return [
            engine for engine in self._engines.values() if engine.accepts_requests and not engine.registration.is_apart
        ]

    def _asked_or_known(self) -> list[Engine]:
        return [each for each in self._engines.values() if each.registration.is_known or each.accepts_requests]
