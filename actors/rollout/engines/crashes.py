"""Recent engine crashes and their causes, as seen by the rollout actor and reported by node daemons."""

import signal
from collections import deque
from typing import Final, NamedTuple

import anyio

from messages import ActorExited
from runtime.util.formatting import signal_name

EXIT_TIMEOUT_S: Final = 20.0  # for the node daemon's report on a dead process
KEPT: Final = 1000  # crashes, and process exits
KILLS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Crash(NamedTuple):
    """A crash of an engine that accepted requests."""

    engine: str
    at: float  # seconds of the loop's clock


class CrashCause(NamedTuple):
    """The cause of an engine crash, as the sender of a lost request sees it."""

    killed: bool  # killed from outside
    reason: str


class RecentCrashes:
    """The most recent engine crashes."""

    def __init__(self) -> None:
        self._crashes = deque[Crash](maxlen=KEPT)
        self._exits = deque[ActorExited](maxlen=KEPT)
        self._exited = anyio.Event()  # replaced after each exit

    def note(self, engine: str) -> None:
        """Record the crash of an engine that accepted requests."""
        self._crashes.append(Crash(engine, anyio.current_time()))

    def note_exit(self, event: ActorExited) -> None:
        """Record the exit of a process of the run, as reported by its node daemon."""
        self._exits.append(event)
        exited, self._exited = self._exited, anyio.Event()
        exited.set()

    def any_since(self, at: float, engine: str) -> bool:
        """Whether the engine has crashed since a time; any engine if `engine` is empty."""
        return any(crash.at >= at and engine in ("", crash.engine) for crash in self._crashes)

    async def exit_of(self, engine: str, pid: int) -> ActorExited | None:
        """Return how a process exited; None if its node daemon does not report it in time."""
        with anyio.move_on_after(EXIT_TIMEOUT_S):
            while True:
                found = [event for event in self._exits if (event.actor, event.pid) == (engine, pid)]
                if found:
                    return found[-1]
                await self._exited.wait()
        return None


def was_killed(exit: ActorExited) -> bool:
    """Whether a process was killed from outside: by a signal, without another reason from its node daemon. Pure."""
    number = -exit.exit_code
    return number in KILLS and exit.reason == f"killed by {signal_name(number)}"
