"""Restart budget and backoff of a process, and restart groups: processes that start and end together."""

from collections.abc import Callable

import anyio

from runtime.node.supervisor.ports import free_port
from runtime.settings.placement import LOOPBACK
from runtime.util.retrying import Backoff

BACKOFF = Backoff(first_s=0.1, max_s=10.0)
LASTING_S = 30.0  # a process that ran this long did not fail at its start


class RestartGroup:
    """Synchronizes the supervisors of one restart group.

    A restarted process could not rejoin the running ones. So when one ends, all are killed, and none starts before all
    have ended.
    """

    def __init__(self, size: int, host: str = LOOPBACK) -> None:
        self.host = host  # of the rendezvous
        self.port = 0  # of the rendezvous; a new one for each start
        self._size = size
        self._waiting = 0
        self._meeting = anyio.Event()
        self._kills: dict[str, Callable[[str], None]] = {}

    def join(self, name: str, kill: Callable[[str], None]) -> None:
        """Add a process. `kill` ends it if it runs; its argument is the name of the process that ended first."""
        self._kills[name] = kill

    async def meet(self) -> None:
        """Wait until all processes are about to start."""
        meeting = self._meeting
        self._waiting += 1
        try:
            if self._waiting == self._size:
                self.port, self._meeting = free_port(self.host), anyio.Event()
                meeting.set()
            await meeting.wait()
        finally:
            self._waiting -= 1

    def ended(self, name: str) -> None:
        """Kill all others, because one process ended."""
        for other, kill in self._kills.items():
            if other != name:
                kill(name)


class RestartBudget:
    """Number of restarts left to a process, and the delay before each.

    Progress of the run refills the budget. The delay doubles with each early end, whatever the run does meanwhile, and
    is reset after a process lasted. It has jitter, so that processes that failed together do not restart together.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._spent = 0
        self._early_ends = 0

    def spend(self, lasted_s: float) -> float | None:
        """Use one restart; return the seconds to wait before it, or None if the budget is used up."""
        if self._spent >= self._max_restarts:
            return None
        self._spent += 1
        self._early_ends = 0 if lasted_s >= LASTING_S else self._early_ends + 1
        return BACKOFF.pause_s(self._early_ends)

    def refill(self) -> None:
        self._spent = 0
