"""Which engines a router knows: asked, and changed. A router that does not answer is asked again by the caller."""

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError


class RouterWorkers:
    """The engines that routers send requests to."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client

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
                await self._client.add_worker(router, engine)
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
                await self._client.remove_worker(router, worker)
        except EngineError:
            return False
        return not found
