"""Processes of this machine, as the kernel shows them in /proc. Standard library only."""

from pathlib import Path
from typing import Final

STATE: Final = 0
BEGUN: Final = 19  # ticks from the machine's boot to the start of the process


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the program's name, which may contain spaces: first the state.

    Raises:
        OSError: there is no such process, or it ends meanwhile.
    """
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
