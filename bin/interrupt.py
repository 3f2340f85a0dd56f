"""Handles Ctrl-C during a command's imports: one line and exit code 130 instead of a traceback."""

import os
import sys
from types import TracebackType

INTERRUPTED = 130  # as in runtime.util.exit_codes, which is not imported yet


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook: handle KeyboardInterrupt, and pass other exceptions to the interpreter's hook."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - None in a process without a stderr
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def handle_ctrl_c() -> None:
    """Install the exception hook. Commands call it before other imports."""
    sys.excepthook = _excepthook
