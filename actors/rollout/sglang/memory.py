"""Memory that an engine gives back between rounds, and takes again: each tag once, in order.

A server asserts that: what is resumed twice, or was never released, ends its scheduler and with it the server.
"""

from typing import Final, Literal, Protocol, get_args

from actors.rollout.sglang.client import SglangClient

Tag = Literal["kv_cache", "weights", "cuda_graph"]
TAGS: Final[tuple[Tag, ...]] = get_args(Tag)


class Notes(Protocol):
    """Where it is kept what an engine has given back, over the life of who told it."""

    async def read(self) -> tuple[list[Tag], bool]:
        """What it has given back, and whether that is sure."""
        ...

    async def write(self, released: list[Tag], *, sure: bool) -> None:
        """Note what it has given back, or is about to."""
        ...


class EngineMemory:
    """What one engine has released, as far as we told it. The caller sees to it that the engine is idle.

    Args:
        client: for the engine.
        engine: its URL.
        notes: also what an earlier one of us told it; none: there was none.
    """

    def __init__(self, client: SglangClient, engine: str, notes: Notes | None = None) -> None:
        self._client = client
        self._engine = engine
        self._notes = notes
        self._released: list[Tag] = []
        self.is_sure = True  # what it has released; not when a call to it has failed, or was never answered

    @property
    def released(self) -> tuple[Tag, ...]:
        """What it has given back."""
        return tuple(self._released)

    async def inherit(self) -> None:
        """Take over what an earlier one of us told it."""
        if self._notes is not None:
            self._released, self.is_sure = await self._notes.read()

    async def release(self, *tags: Tag) -> None:
        """Have it give back memory of these kinds, none: of all; what it has given back already is left out."""
        wanted: list[Tag] = [tag for tag in tags or TAGS if tag not in self._released]
        if wanted:
            await self._note([*self._released, *wanted])
            await self._client.release_memory(self._engine, wanted)
            await self._confirm()

    async def resume(self, *tags: Tag) -> None:
        """Have it take memory again, none: all that it gave back. Weights are to be loaded after that."""
        wanted = [tag for tag in tags or TAGS if tag in self._released]
        if wanted:
            await self._note([tag for tag in self._released if tag not in wanted])
            await self._client.resume_memory(self._engine, wanted)
            await self._confirm()

    async def _note(self, released: list[Tag]) -> None:
        """Told is told: whether it did shows in its answer alone."""
        if self._notes is not None:
            await self._notes.write(released, sure=False)
        self._released, self.is_sure = released, False

    async def _confirm(self) -> None:
        if self._notes is not None:
            await self._notes.write(self._released, sure=True)
        self.is_sure = True
