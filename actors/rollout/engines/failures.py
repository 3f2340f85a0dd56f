"""What the failures of engines say: crashes and their causes, unusable answers, and refused weights.

An engine may be alive, hold the right weights, and still return only unusable answers. A bad request fails the same way
on every engine, so an engine is judged only by requests of several prompt groups. The samples of two bad prompts fail
at the same moment, so there must also be no good answer for some seconds.
"""

import math
import signal
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import anyio

from messages import ActorExited
from runtime.util.formatting import signal_name

EXIT_TIMEOUT_S: Final = 20.0  # for the node daemon's report on a dead process
KEPT: Final = 1000  # crashes, and process exits
KILLS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

FAILURES_IN_A_ROW: Final = 5  # consecutive failures before it is quarantined or restarted
FAILING_FOR_S: Final = 5.0  # seconds since the first of them, without a good answer
NUM_GROUPS: Final = 2  # prompt groups with failures; with only one, its prompt may be the cause

REFUSED_PATIENCE_S: Final = 60.0  # while no engine accepts the weights; a restart of the trainer may help
# seconds of refusals before an engine of the run is restarted: its process may be the cause
RESTART_AFTER_S: Final = 10.0
RESTART_AFTER: Final = 3  # minimum number of refusals, also before it is given up
MAX_RESTARTS: Final = 1  # while no engine holds the weights; a fresh process that refuses them too shows that they,
# or the check, are the cause
MAX_RESTARTS_BESIDE: Final = 2  # while others hold the weights; the third process that refuses them is given up
DAMAGED_PATIENCE_S: Final = 3600.0  # the trainer may be busy with a step before it publishes the same weights again


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


@dataclass
class Record:
    """One engine's failures since its last good answer."""

    failures: int = 0
    failed_at: float = math.inf  # time of the first of them
    groups: set[str] = field(default_factory=set[str])  # prompt groups with failed requests, at most NUM_GROUPS
    blamed_by: set[str] = field(default_factory=set[str])  # those whose failures count: the engine was not busy
    answered_at: float = -math.inf  # seconds of the caller's clock
    reason: str = ""  # of the last failure


class RequestOutcomes:
    """Outcomes of the requests to each engine."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def answered(self, engine: str, at: float) -> None:
        """Record a usable answer of an engine."""
        self._records[engine] = Record(answered_at=at)

    def failed(self, engine: str, group: str, reason: str, at: float, *, counts: bool) -> None:
        """Record a failed request of a prompt group; `counts` is False if the engine was only too busy."""
        record = self._records.setdefault(engine, Record())
        record.failures += counts
        record.failed_at = min(record.failed_at, at) if counts else record.failed_at
        record.reason = reason if counts else record.reason
        if len(record.groups) < NUM_GROUPS:
            record.groups.add(group)
        if counts and len(record.blamed_by) < NUM_GROUPS:
            record.blamed_by.add(group)

    def forget(self, engine: str) -> None:
        """Reset an engine's record: it was restarted, or is retried after a quarantine."""
        self._records.pop(engine, None)

    def keeps_failing(self, engine: str, now: float) -> bool:
        """Whether an engine failed often in a row, for some seconds, on requests of several prompt groups."""
        record = self._records.get(engine, Record())
        is_row = record.failures >= FAILURES_IN_A_ROW and now - record.failed_at >= FAILING_FOR_S
        return is_row and len(record.blamed_by) >= NUM_GROUPS

    def reason(self, engine: str) -> str:
        """Return why an engine's last request failed."""
        return self._records.get(engine, Record()).reason

    def answers(self, engine: str) -> bool:
        """Whether an engine's last request succeeded."""
        record = self._records.get(engine, Record())
        return not record.groups and record.answered_at > -math.inf

    def any_answered_since(self, at: float) -> bool:
        """Whether any engine has returned a usable answer since a time."""
        return any(record.answered_at >= at for record in self._records.values())

    def fails_alone(self, group: str) -> bool:
        """Whether all recent failures belong to one prompt group."""
        return all(record.groups <= {group} for record in self._records.values())


class AfterRefusal(Enum):
    """What to do next with an engine that refuses weights."""

    AGAIN = "again"
    WAIT = "wait"  # for another weight version
    RESTART = "restart"
    DROP = "drop"  # go on without it
    GIVE_UP = "give up"  # end the run


class RefusalCounter:
    """Counts the refusals of one engine since it last accepted weights, across its restarts."""

    def __init__(self) -> None:
        self._since = math.inf
        self._number = 0
        self._restarts = 0

    def took(self) -> None:
        """Forget all refusals and restarts: the engine accepted weights and serves."""
        self._restarts = 0
        self.away()

    def away(self) -> None:
        """Forget earlier refusals: the engine is down or restarting."""
        self._since, self._number = math.inf, 0

    def refused(
        self, now: float, *, damaged: bool, mismatch: bool, may_restart: bool, others_hold: bool
    ) -> AfterRefusal:
        """Count a refusal and return the next action.

        Args:
            now: seconds of any clock.
            damaged: the weight files differ from the announced ones, so no engine can load them.
            mismatch: the engine loaded the weights, and they were not verified.
            may_restart: the engine can be restarted, and its process may be the cause.
            others_hold: another engine serves the weights that this one refuses.
        """
        self._since, self._number = min(self._since, now), self._number + 1
        lasted_s = now - self._since
        if damaged:
            return AfterRefusal.GIVE_UP if lasted_s > DAMAGED_PATIENCE_S and not others_hold else AfterRefusal.WAIT
        is_due = lasted_s > RESTART_AFTER_S and self._number >= RESTART_AFTER
        if may_restart and is_due and self._restarts < (MAX_RESTARTS_BESIDE if others_hold else MAX_RESTARTS):
            self._restarts += 1
            self.away()
            return AfterRefusal.RESTART
        if others_hold:
            return AfterRefusal.DROP if may_restart and is_due else AfterRefusal.AGAIN
        is_same = mismatch and self._restarts > 0 and is_due
        is_late = lasted_s > REFUSED_PATIENCE_S and self._number >= RESTART_AFTER
        return AfterRefusal.GIVE_UP if is_same or is_late else AfterRefusal.AGAIN
