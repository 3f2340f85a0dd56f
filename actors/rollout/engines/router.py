"""Dispatch by sglang-router: it chooses the engines, which register in its worker list. The caller retries."""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from actors.rollout.sglang.client import RouterWorker, SglangClient
from actors.rollout.sglang.errors import EngineError

if TYPE_CHECKING:
    from actors.rollout.engines.engine import Engine

ASK_AGAIN_S: Final = 5.0


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
            self.waits_for = f"the router {router}, which lists engines of others: {', '.join(others)}"
            self.waits_for = self.waits_for if others else "the router"
            for worker in found if not others else ():
                self._asked_at.pop((router, worker.url), None)  # listed now, so a later add must be requested anew
                await self._once(router, worker.id, lambda worker=worker: self._client.remove_worker(router, worker))
        except EngineError:
            return False
        return not found

    def engine_of(self, named: str, label: str) -> str:
        """Return the engine of a weight label: the router does not report which engine has a request."""
        return self._engine_behind(label) or named

    def may_hold(self, engine: str, engines: Mapping[str, "Engine"]) -> list["Engine"]:
        """Return all engines: the router may have sent the request to another one before its first token."""
        return list(engines.values())

    def may_send(self, versions: Sequence[int], oldest: int, min_version: int) -> bool:
        """Whether every engine that the router may choose holds the version."""
        return oldest >= min_version

    def choose(self, engines: Sequence["Engine"], prompt: str, *, failed: str | None, by_name: bool) -> "Engine | None":
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
