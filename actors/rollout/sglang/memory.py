"""Memory that an engine gives back between rounds, and takes again: each tag once, in order.

A server asserts that: what is resumed twice, or was never released, ends its scheduler and with it the server.
"""

from typing import Final, Literal, get_args

from actors.rollout.sglang.client import SglangClient

Tag = Literal["kv_cache", "weights", "cuda_graph"]
TAGS: Final[tuple[Tag, ...]] = get_args(Tag)


class EngineMemory:
    """What one engine has released, as far as we told it. The caller sees to it that the engine is idle."""

    def __init__(self, client: SglangClient, engine: str) -> None:
        self._client = client
        self._engine = engine
        self._released: list[Tag] = []

    async def release(self, *tags: Tag) -> None:
        """Have it give back memory of these kinds, none: of all; what it has given back already is left out."""
        wanted: list[Tag] = [tag for tag in tags or TAGS if tag not in self._released]
        if wanted:
            self._released += wanted  # told is told: whether it did shows in its answer alone
            await self._client.release_memory(self._engine, wanted)

    async def resume(self, *tags: Tag) -> None:
        """Have it take memory again, none: all that it gave back. Weights are to be loaded after that."""
        wanted = [tag for tag in tags or TAGS if tag in self._released]
        if wanted:
            self._released = [tag for tag in self._released if tag not in wanted]
            await self._client.resume_memory(self._engine, wanted)
