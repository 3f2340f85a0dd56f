"""Memory of a process that is not backed by files."""

import os
from pathlib import Path


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
