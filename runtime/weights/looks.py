"""Looks at files on threads, shared by all who ask for the same at one time."""

from collections.abc import Callable, Hashable
from typing import Final

import anyio
import anyio.to_thread

MAX_THREADS: Final = 2  # one reads; one may still wait for a disk that does not answer


class _Look:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.found: str | None = None  # none: it was cut off


class SharedLooks:
    """One look at a time. Who asks while one is under way shares the next one, which begins after all of them asked."""

    def __init__(self) -> None:
        self._next: dict[Hashable, _Look] = {}  # looks that have not begun
        self._reading = anyio.Lock()
        self._threads = anyio.CapacityLimiter(MAX_THREADS)

    async def look(self, key: Hashable, read: Callable[[], str]) -> str:
        """What `read` finds on a thread, begun after this call; a caller that gives up leaves the thread to itself.

        Args:
            key: calls of one key may share a look.
            read: the same for all of them.
        """
        while True:
            look = self._next.get(key)
            if look is None:
                look = self._next[key] = _Look()
                await self._lead(key, look, read)
            else:
                await look.done.wait()
            if look.found is not None:
                return look.found

    async def _lead(self, key: Hashable, look: _Look, read: Callable[[], str]) -> None:
        try:
            async with self._reading:
                del self._next[key]
                look.found = await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._threads)
        finally:
            if self._next.get(key) is look:
                del self._next[key]
            look.done.set()
