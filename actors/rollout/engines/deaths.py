"""Which engines died when, and whether somebody killed them: as their rollout actor saw it, and as their agent says."""

import signal
from collections import deque
from typing import Final, NamedTuple

import anyio

from messages import ActorExited
from runtime.wording import signal_name

EXIT_TIMEOUT_S: Final = 20.0  # for the agent's word on a process that is dead
KEPT: Final = 1000  # deaths, and exits of processes
KILLS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Death(NamedTuple):
    """An engine that had requests and has them no more."""

    engine: str
    at: float  # seconds of the loop's clock


class Deaths:
    """The last deaths of engines."""

    def __init__(self) -> None:
        self._deaths = deque[Death](maxlen=KEPT)
        self._exits = deque[ActorExited](maxlen=KEPT)
        self._exited = anyio.Event()  # replaced with each

    def note(self, engine: str) -> None:
        """An engine that was asked is lost."""
        self._deaths.append(Death(engine, anyio.current_time()))

    def note_exit(self, event: ActorExited) -> None:
        """A process of the run ended, as its agent says."""
        self._exits.append(event)
        exited, self._exited = self._exited, anyio.Event()
        exited.set()

    def any_since(self, at: float, engine: str) -> bool:
        """Whether an engine died since a time; this one, unless it is not known."""
        return any(death.at >= at and engine in ("", death.engine) for death in self._deaths)

    async def exit_of(self, engine: str, pid: int) -> ActorExited | None:
        """How a process ended; None: its agent does not say so for long."""
        with anyio.move_on_after(EXIT_TIMEOUT_S):
            while True:
                found = [event for event in self._exits if (event.actor, event.pid) == (engine, pid)]
                if found:
                    return found[-1]
                await self._exited.wait()
        return None


def was_killed(exit: ActorExited) -> bool:
    """Whether somebody outside ended a process: by a signal, and its agent knows no other reason. Pure."""
    number = -exit.exit_code
    return number in KILLS and exit.reason == f"killed by {signal_name(number)}"
