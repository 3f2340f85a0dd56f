"""Ends a run whose first grades all fail, so that a broken grader is noticed. User code ends a run only this way."""

from collections.abc import Sequence
from typing import Final

from actors.reward.frames import Graded
from actors.reward.pool import TIMEOUT
from runtime.bus.bus import Bus
from runtime.process.actor import InputError

WATCHED: Final = 8  # the run ends when this many first calls of graders all fail
KEY: Final = "reward.graded"  # exists once any grade of this run succeeded
CPU_LIMIT: Final = "raised CpuLimitError("


class FirstGrades:
    """Counts grader calls for training samples until the run's first successful grade.

    A key on the bus records that grade, so a restarted actor does not count again.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._failed = 0
        self._over = False

    async def begin(self) -> None:
        """Read whether an earlier process of this run had a successful grade."""
        self._over = await self._bus.kv.get(KEY, bool) is not None

    async def note(self, grader: str, grades: Sequence[Graded], *, group: bool) -> None:
        """Count the grades of one request.

        Args:
            grader: name of the grader.
            grades: one per sample.
            group: whether all grades come from one call.

        Raises:
            InputError: the first calls of this run all failed; names the grader and its last error.
        """
        if self._over or not grades:
            return
        failures = [graded.error for graded in grades if graded.error is not None]
        if len(failures) < len(grades):
            self._over = True
            await self._bus.kv.put(KEY, True)
            return
        raised = [error for error in failures if not _is_slow(error)][: 1 if group else None]
        self._failed += len(raised)
        if self._failed >= WATCHED and await self._bus.kv.get(KEY, bool) is None:
            message = f"the first {self._failed} calls of graders in this run all failed; {grader}: {raised[-1]}"
            raise InputError(f"{message}. Mend the grader; the same command goes on from here")


def _is_slow(error: str) -> bool:
    """Whether the grader was only too slow, which may be due to load on the machine."""
    return error == TIMEOUT or error.startswith(CPU_LIMIT)
