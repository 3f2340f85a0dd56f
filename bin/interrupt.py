"""Ctrl-C while a command still imports: one line and exit code 130 in place of a traceback. Commands call it first."""

import os
import sys
from types import TracebackType

INTERRUPTED = 130  # runtime.exit_codes, which is not imported yet


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In the place of the interpreter's own: whatever is no Ctrl-C is shown as ever."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - it is, of a process without one
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def told_in_one_line() -> None:
    """Have this process end so."""
    sys.excepthook = _told
