"""Memory of a process that is not backed by files."""

import os
import resource
import threading
from pathlib import Path
from typing import Final

STACK_BYTES: Final = 8 << 20  # reserved for each thread that a library may start, one a core, and hardly used
LOOK_EVERY: Final = 16
_turn: Final = threading.Lock()


def anonymous_bytes(pid: int) -> int | None:
    """Return the anonymous memory of a process on this machine; None if there is no readable process."""
    if not pid:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def own_anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    return anonymous_bytes(os.getpid()) or 0


class MemoryLimit:
    """Lets this process allocate at most so many bytes more in each `with` block. Beyond, MemoryError is raised.

    One block of the process at a time: others wait, since the limit is that of the process. The process may have grown
    by what LOOK_EVERY blocks before left behind.
    """

    def __init__(self, more_bytes: int) -> None:
        self._more_bytes = more_bytes
        self._limit = 0
        self._blocks_left = 0  # before the size of the process is read again, which takes longer than a short block

    def __enter__(self) -> None:
        _turn.acquire()
        if not self._blocks_left:
            stacks = STACK_BYTES * (os.cpu_count() or 1)
            self._limit, self._blocks_left = _data_bytes() + self._more_bytes + stacks, LOOK_EVERY
        self._blocks_left -= 1
        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self._limit if soft == resource.RLIM_INFINITY else min(self._limit, soft)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
        _turn.release()


def _data_bytes() -> int:
    """Return the size of what RLIMIT_DATA counts, data and stack, resident or not."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[5]) * resource.getpagesize()
