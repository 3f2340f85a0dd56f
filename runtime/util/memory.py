"""Memory of a process that is not backed by files."""

import os
import resource
import threading
from pathlib import Path
from typing import Final

STACK_BYTES: Final = 8 << 20  # reserved for each thread that a library may start, one a core, and hardly used
STATM_BYTES: Final = 256  # more than its seven numbers have
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

    One block of the process at a time: others wait, since the limit is that of the process. Its size is read in each
    block: with the limit of an earlier one, a process that has grown since could allocate nothing, and Python ends with
    a wrong exception or a crash where even a frame has no memory.
    """

    def __init__(self, more_bytes: int) -> None:
        self._more_bytes = more_bytes + STACK_BYTES * (os.cpu_count() or 1)

    def __enter__(self) -> None:
        _turn.acquire()
        self._before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _data_bytes() + self._more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
        _turn.release()


def _data_bytes() -> int:
    """Return the size of what RLIMIT_DATA counts, data and stack, resident or not."""
    file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # a file object takes twice as long, in each block
    try:
        return int(os.read(file, STATM_BYTES).split()[5]) * resource.getpagesize()
    finally:
        os.close(file)
