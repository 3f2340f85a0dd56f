"""In-memory router for tests of an engine's registration, without processes."""

from collections.abc import Awaitable, Callable

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import RouterWorker


class OneRouter(SglangClient):
    """Client of a router that keeps its workers in memory. Calls to the engine succeed without effect."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.asked: Callable[[], Awaitable[None]] | None = None  # called once, before the next list of workers

    async def workers(self, router: str) -> list[RouterWorker]:
        asked, self.asked = self.asked, None
        if asked is not None:
            await asked()
        return [RouterWorker(id=f"id of {url}", url=url, is_healthy=True) for url in self.known]

    async def add_worker(self, router: str, engine: str) -> None:
        self.known.add(engine)

    async def remove_worker(self, router: str, worker: RouterWorker) -> None:
        self.known.remove(worker.url)

    async def ready(self, engine: str) -> bool:
        return True

    async def weight_version(self, engine: str) -> str:
        return ""
