"""What a command loads: the cost of its start, whatever else the machine does."""

import os
import subprocess
from collections.abc import Sequence
from typing import Any


def imported(command: Sequence[object], **options: Any) -> set[str]:
    """The modules that a successful command of Python imports, in its own process and in those that it starts."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    words = [str(part) for part in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60, **options)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.rpartition("|")[2].strip() for line in lines}
