"""Outages of one connection, and a clock for deadlines that stands still in them."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

ASK_AGAIN_S: Final = 0.5


class Outages:
    """When the bus was out of service: the connection was lost, or the servers of a cluster could not store.

    Args:
        allowed_s: seconds of each outage that do not count against deadlines.
    """

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._began: float | None = None  # loop time; None: there is no outage
        self._before_s = 0.0  # uncounted seconds of earlier outages
        self._ended = -math.inf  # loop time at which the last outage ended
        self._doubted = asyncio.Event()

    def begin(self, since: float | None = None) -> None:
        """Note that the bus is out of service, since this loop time; None: since now."""
        if self._began is None:
            self._began = _now() if since is None else since

    def end(self) -> None:
        """Note that the bus is in service."""
        if self._began is not None:
            self._before_s += min(self.away_s, self._allowed_s)
            self._began, self._ended = None, _now()

    def doubt(self) -> None:
        """Have `watch` find out whether the bus is in service."""
        self._doubted.set()

    async def watch(self, is_in_service: Callable[[], Awaitable[bool]]) -> None:
        """Begin and end outages of a cluster that accepts connections but may store nothing. Never returns."""
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            asked = _now()
            while not await is_in_service():
                self.begin(asked)
                await asyncio.sleep(ASK_AGAIN_S)  # the servers offer no notification
            self.end()

    @property
    def away_s(self) -> float:
        """Seconds since the outage began; 0 while there is none."""
        return 0.0 if self._began is None else _now() - self._began

    @property
    def back_s(self) -> float:
        """Seconds since the last outage ended; infinite if there was none."""
        return _now() - self._ended

    @property
    def left_s(self) -> float:
        """Seconds of the current outage that will not count against deadlines."""
        return max(0.0, self._allowed_s - self.away_s)

    @property
    def is_allowed(self) -> bool:
        """Whether there is an outage that does not count against deadlines."""
        return self._began is not None and self.left_s > 0

    def time(self) -> float:
        """Seconds on a clock for deadlines. It stands still in an outage, for up to allowed_s of each."""
        return _now() - self._before_s - min(self.away_s, self._allowed_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
