"""Threads for blocking calls that may hang: a user's function, a slow disk."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio import from_thread, to_thread

T = TypeVar("T")


class BoundedThreads:
    """Runs blocking calls in a bounded number of threads. A cancelled caller abandons its thread.

    anyio's limiter forgets a thread as soon as its caller is cancelled, so calls that hang would pile up without bound.
    Here an abandoned thread keeps its place until the call returns.

    Args:
        limit: number of calls that may run at a time, abandoned ones included. Further callers wait.
    """

    def __init__(self, limit: int) -> None:
        self._places = anyio.CapacityLimiter(limit)

    @property
    def is_full(self) -> bool:
        """Whether a further call would have to wait."""
        return not self._places.available_tokens

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread and return its result."""
        place = _Place(self._places)
        await self._places.acquire_on_behalf_of(place)

        def work() -> T:
            place.is_occupied = True
            try:
                return call()
            finally:
                with suppress(RuntimeError):  # the event loop has ended
                    from_thread.run_sync(place.leave)

        try:
            return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        finally:
            if not place.is_occupied:  # cancelled before the thread began
                place.leave()


class _Place:
    """A place in the limiter; left once, on the event loop."""

    def __init__(self, places: anyio.CapacityLimiter) -> None:
        self.is_occupied = False
        self._places = places
        self._is_left = False

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._places.release_on_behalf_of(self)
