"""Which engines a router knows: asked, and changed. A router that does not answer is asked again by the caller."""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError

ASK_AGAIN_S: Final = 5.0


class RouterWorkers:
    """The engines that routers send requests to.

    A router answers at once and does what it was asked later, in no order, by the engine's URL: a second removal would
    remove the engine after it has come back. So each thing is asked once, and again only when it should long be done.
    """

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self._asked_at: dict[tuple[str, str], float] = {}  # by router and what was asked

    async def answers(self, router: str) -> bool:
        """Whether it says which engines it knows."""
        try:
            await self._client.workers(router)
        except EngineError:
            return False
        return True

    async def has(self, router: str, engine: str) -> bool:
        """Whether it knows an engine as healthy; it is asked to take it in where it is missing."""
        try:
            listed = [worker for worker in await self._client.workers(router) if worker.url == engine]
            if not listed:
                await self._once(router, engine, lambda: self._client.add_worker(router, engine))
        except EngineError:
            return False
        return any(worker.is_healthy for worker in listed)

    async def lacks(self, router: str, engine: str) -> bool:
        """Whether it answers and does not know an engine."""
        try:
            return all(worker.url != engine for worker in await self._client.workers(router))
        except EngineError:
            return False

    async def free_of(self, router: str, engine: str | None) -> bool:
        """Whether it answers and does not know an engine, or none at all; those that it knows are removed."""
        try:
            found = [worker for worker in await self._client.workers(router) if engine is None or worker.url == engine]
            for worker in found:
                self._asked_at.pop((router, worker.url), None)  # it is in: to be asked afresh when it is out
                await self._once(router, worker.id, lambda worker=worker: self._client.remove_worker(router, worker))
        except EngineError:
            return False
        return not found

    async def _once(self, router: str, what: str, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask something of a router, unless that was asked of it lately and it took it."""
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
