"""Restart budget and backoff of a process, and restart groups: processes that start and end together."""

from collections.abc import Callable
from typing import Protocol

import anyio

from runtime.bus.addresses import host_port
from runtime.node.supervisor.ports import free_port
from runtime.settings.placement import LOOPBACK
from runtime.util.retrying import Backoff

BACKOFF = Backoff(first_s=0.1, max_s=10.0)
LASTING_S = 30.0  # a process that ran this long did not fail at its start


class Agreement(Protocol):
    """Agrees with the other nodes of a restart group on each of its starts (runtime/node/group_starts.py)."""

    async def agree(self, address: str) -> str:
        """Wait until the processes of all nodes may start, and return the address of their rendezvous.

        Args:
            address: free for a rendezvous on this node.
        """
        ...

    def ended(self, process: str) -> None:
        """Have the processes of the other nodes killed, because one of this node ended."""
        ...

    def watch(self, kill: Callable[[str], None]) -> None:
        """Set what kills the processes of this node. Its argument is the name of the process that ended first."""
        ...


class RestartGroup:
    """Synchronizes the supervisors of one restart group.

    A restarted process could not rejoin the running ones. So when one ends, all are killed, and none starts before all
    have ended.

    Args:
        size: number of processes on this node.
        host: address of this node, for a rendezvous.
        agreement: with the other nodes, if they run processes of the group.
    """

    def __init__(self, size: int, host: str = LOOPBACK, agreement: Agreement | None = None) -> None:
        self.address = ""  # of the rendezvous; a new one for each start
        self.ended_first = ""  # the process that ended first since the last start
        self._host = host
        self._size = size
        self._waiting = 0
        self._meeting = anyio.Event()
        self._kills: dict[str, Callable[[str], None]] = {}
        self._agreement = agreement
        if agreement is not None:
            agreement.watch(self._end_all)

    def join(self, name: str, kill: Callable[[str], None]) -> None:
        """Add a process. `kill` ends it if it runs; its argument is the name of the process that ended first."""
        self._kills[name] = kill

    async def meet(self) -> None:
        """Wait until all processes are about to start."""
        meeting = self._meeting
        self._waiting += 1
        try:
            if self._waiting == self._size:
                address = host_port(self._host, free_port(self._host))
                self.ended_first = ""
                self.address = address if self._agreement is None else await self._agreement.agree(address)
                self._meeting = anyio.Event()
                meeting.set()
            await meeting.wait()
        finally:
            self._waiting -= 1

    def ended(self, name: str, *, stopped: bool) -> None:
        """Kill all others, because one process ended. On other nodes too, unless this node stops its processes."""
        self._end_all(name)
        if self._agreement is not None and not stopped:
            self._agreement.ended(name)

    def _end_all(self, first: str) -> None:
        self.ended_first = self.ended_first or first
        for other, kill in self._kills.items():
            if other != first:
                kill(self.ended_first)


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
