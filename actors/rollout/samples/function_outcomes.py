"""What the calls of users' generate functions came to: their tracebacks, and the end of a run in which none works."""

from typing import Final

from actors.rollout.samples.conversation import FunctionFailed, FunctionRaised
from actors.rollout.samples.tasks import GroupTask
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from runtime.process.first_calls import FirstCalls
from runtime.process.user_tracebacks import UserTracebacks
from runtime.util.stacks import place_in
from runtime.util.tracebacks import user_frames, user_traceback

FIRST_CALL_KEY: Final = "rollout.generated"  # exists once any generate function of this run has ended by itself


class FunctionOutcomes:
    """Publishes each traceback once, and counts the first calls for training samples."""

    def __init__(self, bus: Bus) -> None:
        self.tracebacks = UserTracebacks(bus)
        self._calls = FirstCalls(bus, FIRST_CALL_KEY, "calls of generate functions")

    async def begin(self) -> None:
        """Read whether a function has ended by itself in an earlier process of this run."""
        await self._calls.begin()

    async def worked(self, task: GroupTask) -> None:
        """Note a call that ended by itself."""
        if task.round is not None:
            await self._calls.succeeded()

    async def failed(self, task: GroupTask, error: FunctionFailed) -> None:
        """Note a call that failed.

        Raises:
            InputError: the first calls of this run all failed; names the newest error and its place.
        """
        trace = traceback_of(error)
        await self.tracebacks.publish(
            str(error).partition(":")[0], trace or error.stopped_at, took_too_long=bool(error.stopped_at)
        )
        if task.round is None or not error.is_own:
            return
        if why := await self._calls.failed(task.group_id):
            place = "" if trace else place_in(error.stopped_at)
            newest = f"{error} ({place})" if place else str(error)
            raise InputError(f"{why}; the newest with {newest}. Correct it; the same command then resumes the run")


def traceback_of(error: FunctionFailed) -> str:
    """Return the traceback of what a user's function raised; empty: it raised nothing, or not in its own code."""
    cause = error.__cause__
    return user_traceback(cause) if isinstance(error, FunctionRaised) and cause and user_frames(cause) else ""
