"""File checks on threads, shared by concurrent callers of the same check."""

from collections.abc import Callable, Hashable
from typing import Final

import anyio

from runtime.util.threads import BoundedThreads

MAX_THREADS: Final = 2  # one reads; an abandoned one may still wait for the disk


class _Look:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.found: str | None = None  # none: it was cancelled


class SharedLooks:
    """Runs one check at a time. Calls during a check share the next one, which starts after all these calls."""

    def __init__(self) -> None:
        self._next: dict[Hashable, _Look] = {}  # checks that have not started
        self._reading = anyio.Lock()
        self._threads = BoundedThreads(MAX_THREADS)

    async def look(self, key: Hashable, read: Callable[[], str]) -> str:
        """Run `read` on a thread, started after this call, and return its result. Cancellation abandons the thread.

        Args:
            key: calls with the same key may share a check.
            read: the same function for all of them.
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
                look.found = await self._threads.run(read)
        finally:
            if self._next.get(key) is look:
                del self._next[key]
            look.done.set()
