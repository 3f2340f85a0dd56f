"""Room for samples in flight."""

import anyio


class Slots:
    """A counted resource of which several are taken at once; the first to ask is the first to get."""

    def __init__(self, total: int) -> None:
        self._free = total
        self.total = total
        self._queue = anyio.Lock()  # one waits for room, the others behind it
        self._freed = anyio.Condition()

    @property
    def taken(self) -> int:
        """Slots in use."""
        return self.total - self._free

    async def take(self, wanted: int) -> int:
        """Wait for `wanted` slots, or for all there are if that is fewer.

        Returns:
            How many were taken, to be given back.
        """
        number = min(wanted, self.total)
        async with self._queue, self._freed:
            while self._free < number:
                await self._freed.wait()
            self._free -= number
        return number

    async def give_back(self, number: int) -> None:
        """Free slots taken before."""
        with anyio.CancelScope(shield=True):
            async with self._freed:
                self._free += number
                self._freed.notify_all()
