"""Memory occupied by an engine's process."""

from pathlib import Path


def is_there(pid: int) -> bool:
    """Whether a process on this machine still exists. Its successor starts only after it has ended."""
    return Path(f"/proc/{pid}").exists()


def anonymous_bytes(pid: int) -> int | None:
    """Return a local process's memory that is not backed by files; None if there is no readable process."""
    if not pid:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)
