"""State changes of a supervised process, for listeners."""

import signal
from collections.abc import Callable
from typing import Final

import msgspec

from runtime.settings.processes import ProcessSpec
from runtime.util.exit_codes import EXIT_FENCED, EXIT_INPUT_ERROR, EXIT_NO_SPACE
from runtime.util.formatting import signal_name
from runtime.util.stacks import Culprit

STOPPED: Final = "stopped"  # reason of an exit that the node daemon asked for
LASTING: Final = {  # exit codes after which a restart would not help
    EXIT_INPUT_ERROR: "input error",
    EXIT_FENCED: "fenced: another process took over",
    EXIT_NO_SPACE: "no space left",
}


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A process started."""

    spec: ProcessSpec
    pid: int
    restarts: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A process is ready."""

    spec: ProcessSpec
    host: str | None
    port: int | None
    pid: int
    restarts: int


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """A process has shown no sign of life for some time, or shows one again. It runs on."""

    spec: ProcessSpec
    pid: int
    silent_s: float  # so far, or until it answered
    answers: bool  # again


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """A process ended."""

    spec: ProcessSpec
    pid: int
    exit_code: int  # negative: killed by that signal
    reason: str
    restart_in_s: float | None  # none: there is no restart


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """A call blocks the event loop of a process, or has blocked it."""

    spec: ProcessSpec
    pid: int
    blocked_s: float  # so far
    ended: bool
    culprit: Culprit


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """A process ended unexpectedly and is not restarted."""

    spec: ProcessSpec
    exit_code: int
    reason: str
    log: str  # path
    tail: tuple[str, ...]  # its last lines


Change = Started | Ready | Silent | Blocked | Exited | GivenUp
Listener = Callable[[Change], None]


def describe_exit(code: int) -> str:
    """Describe an exit code."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    if code - 128 in (signal.SIGINT, signal.SIGTERM):
        return f"exit code {code}, as after {signal_name(code - 128)}"
    return f"exit code {code}, {LASTING[code]}" if code in LASTING else f"exit code {code}"
