"""What commands cost, as figures that a busy machine leaves as they are."""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def interpreter_starts(command: Sequence[object], *, tries: int = 3, **options: Any) -> float:
    """CPU time of a successful command, in starts of a bare interpreter. Takes the best of some tries of each."""
    bare = min(_cpu_s([sys.executable, "-c", "pass"], {}) for _ in range(tries))
    return min(_cpu_s(command, options) for _ in range(tries)) / bare


def imported(command: Sequence[object], **options: Any) -> set[str]:
    """The modules that a successful command of Python imports, in its own process and in those that it starts."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    words = [str(part) for part in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60, **options)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.rpartition("|")[2].strip() for line in lines}


def _cpu_s(command: Sequence[object], options: dict[str, Any]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(part) for part in command], capture_output=True, check=True, timeout=60, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
