"""Restart groups: processes of one server or trainer, which start and end together and share a rendezvous address."""

from collections.abc import Callable

import anyio

from runtime.node.supervisor.ports import free_port


class RestartGroup:
    """Synchronizes the supervisors of one restart group.

    A restarted process could not rejoin the running ones. So when one ends, all are killed, and none starts before all
    have ended.
    """

    def __init__(self, size: int) -> None:
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
                self.port, self._meeting = free_port(), anyio.Event()
                meeting.set()
            await meeting.wait()
        finally:
            self._waiting -= 1

    def ended(self, name: str) -> None:
        """Kill all others, because one process ended."""
        for other, kill in self._kills.items():
            if other != name:
                kill(name)
