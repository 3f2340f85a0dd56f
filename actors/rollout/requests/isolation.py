"""Isolation runs: each quarantined request runs alone on one engine."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.serving import Serving
from actors.rollout.requests.interrupting import RunningRequests

log = structlog.get_logger()


class IsolationRuns:
    """Runs one quarantined request at a time. Its engine stays isolated until no other quarantined request waits."""

    def __init__(self, serving: Serving, running: RunningRequests) -> None:
        self._serving = serving
        self._running = running
        self._lock = anyio.Lock()
        self._num_waiting = 0
        self._engine: Engine | None = None  # the isolated engine

    @asynccontextmanager
    async def alone(self, min_version: int, unless: Callable[[], bool]) -> AsyncGenerator[Engine | None]:
        """Yield an engine that serves no other request of this run; None if `unless` became true first."""
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield await self._set_apart(min_version, unless)
        finally:
            try:
                if not self._num_waiting or (self._engine is not None and not self._engine.accepts_requests):
                    await self._join()
            finally:
                self._lock.release()

    async def _set_apart(self, min_version: int, unless: Callable[[], bool]) -> Engine | None:
        engine = self._engine
        is_ready = engine is not None and engine.accepts_requests and engine.version >= min_version
        if is_ready and not self._serving.is_held:
            return None if unless() else engine
        await self._join()
        while await self._serving.wait_ready(min_version, unless=unless):
            engine = self._serving.any_engine()
            if engine is None:
                continue
            self._engine = engine
            await engine.registration.set_apart()
            await self._until_alone(engine)
            if engine.accepts_requests:
                log.info("engine_set_apart", engine=engine.name)
                return engine
            await self._join()
        return None

    async def _until_alone(self, engine: Engine) -> None:
        """Wait until all requests that may be on the engine have ended; the router sends it no new ones."""
        before = [sent for sent in self._running.open.values() if sent.engine in ("", engine.name)]
        while engine.accepts_requests and any(
            sent in self._running.open.values() and sent.engine in ("", engine.name) for sent in before
        ):
            await self._running.any_ended(1.0)

    async def _join(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.registration.join()
