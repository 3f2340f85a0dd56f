"""Releases and resumes an engine's memory, each tag once and in order.

An SGLang server asserts that order: resuming a tag twice, or one that was never released, crashes the server.
"""

from typing import Final, Literal, Protocol, get_args

from actors.rollout.sglang.client import SglangClient

Tag = Literal["kv_cache", "weights", "cuda_graph"]
TAGS: Final[tuple[Tag, ...]] = get_args(Tag)


class Notes(Protocol):
    """Persistent storage of the memory that an engine has released, across restarts of the rollout actor."""

    async def read(self) -> tuple[list[Tag], bool]:
        """Return the released memory kinds, and whether that is certain."""
        ...

    async def write(self, released: list[Tag], *, sure: bool) -> None:
        """Store which memory kinds are released. Called before and after each memory call to the engine."""
        ...


class EngineMemory:
    """The memory that one engine released on this run's request. The caller ensures that the engine is idle.

    Args:
        client: for the engine.
        engine: its URL.
        notes: storage that outlives this object; None: nothing is stored.
    """

    def __init__(self, client: SglangClient, engine: str, notes: Notes | None = None) -> None:
        self._client = client
        self._engine = engine
        self._notes = notes
        self._released: list[Tag] = []
        self.is_sure = True  # False while the outcome of a call is unknown

    @property
    def released(self) -> tuple[Tag, ...]:
        """The released memory kinds."""
        return tuple(self._released)

    async def inherit(self) -> None:
        """Load the state stored by an earlier rollout actor."""
        if self._notes is not None:
            self._released, self.is_sure = await self._notes.read()

    async def release(self, *tags: Tag) -> None:
        """Make the engine release these memory kinds, or all if none are given. Skips released ones."""
        wanted: list[Tag] = [tag for tag in tags or TAGS if tag not in self._released]
        if wanted:
            await self._note([*self._released, *wanted])
            await self._client.release_memory(self._engine, wanted)
            await self._confirm()

    async def resume(self, *tags: Tag) -> None:
        """Make the engine resume these memory kinds, or all that it released.

        Resumed weights must be updated afterwards.
        """
        wanted = [tag for tag in tags or TAGS if tag in self._released]
        if wanted:
            await self._note([tag for tag in self._released if tag not in wanted])
            await self._client.resume_memory(self._engine, wanted)
            await self._confirm()

    async def _note(self, released: list[Tag]) -> None:
        """Record the change before the call: only its response shows whether it happened."""
        if self._notes is not None:
            await self._notes.write(released, sure=False)
        self._released, self.is_sure = released, False

    async def _confirm(self) -> None:
        if self._notes is not None:
            await self._notes.write(self._released, sure=True)
        self.is_sure = True
