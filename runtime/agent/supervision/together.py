"""Processes that are parts of one server or trainer: started together, with an address to meet at, ended together."""

from collections.abc import Callable

import anyio

from runtime.agent.supervision.ports import free_port


class Together:
    """Where the supervisors of the parts of a whole wait for each other.

    A process that is started again would not find the others as it left them: when one ends, all are killed, and none
    is started before all have ended.
    """

    def __init__(self, size: int) -> None:
        self.port = 0  # where they meet; another one each time
        self._size = size
        self._waiting = 0
        self._meeting = anyio.Event()
        self._kills: dict[str, Callable[[str], None]] = {}

    def join(self, name: str, kill: Callable[[str], None]) -> None:
        """Take a process in; `kill` ends it, if it runs, because of the one that it is told."""
        self._kills[name] = kill

    async def meet(self) -> None:
        """Return when all are about to start."""
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
        """One has ended: the others are to end."""
        for other, kill in self._kills.items():
            if other != name:
                kill(name)
