"""A router that knows what it is told, without processes, for what an engine does around it."""

from collections.abc import Awaitable, Callable

from actors.rollout.sglang.client import RouterWorker, SglangClient


class OneRouter(SglangClient):
    """Knows the engines that it is told of; the engine that it asks for is as it was."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.asked: Callable[[], Awaitable[None]] | None = None  # done once, before it says which it knows

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
