"""Notices a grader that never works: ends a run whose first grades all failed. The one way user code ends a run."""

from collections.abc import Sequence
from typing import Final

from actors.reward.frames import Graded
from actors.reward.pool import TIMEOUT
from runtime.bus.bus import Bus
from runtime.host.actor import InputError

WATCHED: Final = 8  # calls of graders that may all fail before the run ends
KEY: Final = "reward.graded"  # is there once any grade of this run was good
CPU_LIMIT: Final = "raised CpuLimitError("


class FirstGrades:
    """Counts calls of graders for training samples until the first good grade of the run.

    The bus remembers that grade, so an actor that is restarted later does not count again.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._failed = 0
        self._over = False

    async def begin(self) -> None:
        """Find out whether an earlier process of this run had a good grade."""
        self._over = await self._bus.kv.get(KEY, bool) is not None

    async def note(self, grader: str, grades: Sequence[Graded], *, group: bool) -> None:
        """Count the grades of one request.

        Args:
            grader: who gave them.
            grades: one per sample.
            group: all of them are of one call.

        Raises:
            InputError: the first calls of this run all failed; says which grader, and why.
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
    """Whether the grader was only too slow, which a machine under load may explain."""
    return error == TIMEOUT or error.startswith(CPU_LIMIT)
