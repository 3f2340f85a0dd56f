"""How often and how soon a process is started again."""

from runtime.retrying import Backoff

BACKOFF = Backoff(first_s=0.1, max_s=10.0)
LASTING_S = 30.0  # a process that ran for so long did not fail at its start


class RestartBudget:
    """How often and how soon a process is started again.

    Progress of the run refills the budget. The delay doubles with each early end, whatever the run does meanwhile, and
    begins anew after a process has lasted. It is drawn anew each time: processes that failed together, as of one cause,
    are not started again together.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._spent = 0
        self._early_ends = 0

    def spend(self, lasted_s: float) -> float | None:
        """Seconds to wait before the next start of a process that lasted so long; none when the budget is used up."""
        if self._spent >= self._max_restarts:
            return None
        self._spent += 1
        self._early_ends = 0 if lasted_s >= LASTING_S else self._early_ends + 1
        return BACKOFF.pause_s(self._early_ends)

    def refill(self) -> None:
        self._spent = 0
