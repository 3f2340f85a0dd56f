"""Restart budget and backoff of a process."""

from runtime.util.retrying import Backoff

BACKOFF = Backoff(first_s=0.1, max_s=10.0)
LASTING_S = 30.0  # a process that ran this long did not fail at its start


class RestartBudget:
    """Number of restarts left to a process, and the delay before each.

    Progress of the run refills the budget. The delay doubles with each early end, whatever the run does meanwhile, and
    is reset after a process lasted. It has jitter, so that processes that failed together do not restart together.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._spent = 0
        self._early_ends = 0

    def spend(self, lasted_s: float) -> float | None:
        """Use one restart; return the seconds to wait before it, or None if the budget is used up."""
        if self._spent >= self._max_restarts:
            return None
        self._spent += 1
        self._early_ends = 0 if lasted_s >= LASTING_S else self._early_ends + 1
        return BACKOFF.pause_s(self._early_ends)

    def refill(self) -> None:
        self._spent = 0
