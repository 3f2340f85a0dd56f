"""CPU time of commands relative to the start of a bare interpreter, so that a busy machine gives the same result."""

import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def interpreter_starts(command: Sequence[object], *, tries: int = 3, **options: Any) -> float:
    """CPU time of a successful command, in starts of a bare interpreter. Takes the best of some tries of each."""
    bare = min(_cpu_s([sys.executable, "-c", "pass"], {}) for _ in range(tries))
    return min(_cpu_s(command, options) for _ in range(tries)) / bare


def _cpu_s(command: Sequence[object], options: dict[str, Any]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(part) for part in command], capture_output=True, check=True, timeout=60, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
