"""Slots for samples in flight."""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio


class Slots:
    """A FIFO counting semaphore with multi-slot acquisition."""

    def __init__(self, total: int) -> None:
        self._free = total
        self.total = total
        self._queue: deque[_Turn] = deque()

    @property
    def taken(self) -> int:
        """Slots in use."""
        return self.total - self._free

    @property
    def free(self) -> int:
        """Slots not in use."""
        return self._free

    async def take(self, wanted: int) -> int:
        """Wait for `wanted` slots, or for all slots if there are fewer in total.

        Returns:
            Number of slots taken, to be given back.
        """
        turn = _Turn(min(wanted, self.total))
        self._queue.append(turn)
        self._serve()
        if not turn.served.is_set():
            try:
                await turn.served.wait()
            except anyio.get_cancelled_exc_class():
                self._leave(turn)
                raise
        return turn.number

    def give_back(self, number: int) -> None:
        """Release slots."""
        self._free += number
        self._serve()

    def _leave(self, turn: "_Turn") -> None:
        if turn.served.is_set():
            self._free += turn.number
        else:
            self._queue.remove(turn)
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0].number <= self._free:
            turn = self._queue.popleft()
            self._free -= turn.number
            turn.served.set()


class _Turn:
    def __init__(self, number: int) -> None:
        self.number = number
        self.served = anyio.Event()


class Release:
    """Releases slots once; may be called before the end of the block."""

    def __init__(self, slots: Slots, taken: int) -> None:
        self._slots = slots
        self._taken = taken

    def __call__(self) -> None:
        taken, self._taken = self._taken, 0
        self._slots.give_back(taken)


@asynccontextmanager
async def released(slots: Slots, taken: int) -> AsyncGenerator[Release]:
    """Release the slots at the end of a block, or earlier on request."""
    release = Release(slots, taken)
    try:
        yield release
    finally:
        release()
