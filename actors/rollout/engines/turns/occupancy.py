"""Memory that an engine's process keeps others from."""

from pathlib import Path


def is_there(pid: int) -> bool:
    """Whether a process of this machine has not ended yet. Its successor begins only after that."""
    return Path(f"/proc/{pid}").exists()


def anonymous_bytes(pid: int) -> int | None:
    """Memory of a process of this machine that no file backs; None: there is none that can be looked at."""
    if not pid:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)
