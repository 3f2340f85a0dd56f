"""Policy for an engine that refuses weights: retry, wait for another version, restart it, or give up. Pure."""

import math
from enum import Enum
from typing import Final

REFUSED_PATIENCE_S: Final = 60.0  # while no engine accepts the weights; a restart of the trainer may help
# seconds of refusals before an engine of the run is restarted: its process may be the cause
RESTART_AFTER_S: Final = 10.0
RESTART_AFTER: Final = 3  # minimum number of refusals, also before it is given up
MAX_RESTARTS: Final = 2  # restarts of the only engine; after that the weights are the likely cause
DAMAGED_PATIENCE_S: Final = 3600.0  # the trainer may be busy with a step before it publishes the same weights again


class AfterRefusal(Enum):
    """What to do next with an engine that refuses weights."""

    AGAIN = "again"
    WAIT = "wait"  # for another weight version
    RESTART = "restart"
    GIVE_UP = "give up"


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

    def refused(self, now: float, *, damaged: bool, may_restart: bool, others_serve: bool) -> AfterRefusal:
        """Count a refusal and return the next action.

        Args:
            now: seconds of any clock.
            damaged: the weight files differ from the announced ones, so no engine can load them.
            may_restart: the engine can be restarted, and its process may be the cause.
            others_serve: another engine serves the weights that this one refuses.
        """
        self._since, self._number = min(self._since, now), self._number + 1
        lasted_s = now - self._since
        if damaged:
            return AfterRefusal.GIVE_UP if lasted_s > DAMAGED_PATIENCE_S and not others_serve else AfterRefusal.WAIT
        tries_left = others_serve or self._restarts < MAX_RESTARTS
        if may_restart and tries_left and lasted_s > RESTART_AFTER_S and self._number >= RESTART_AFTER:
            self._restarts += 1
            self.away()
            return AfterRefusal.RESTART
        if lasted_s > REFUSED_PATIENCE_S and self._number >= RESTART_AFTER and not others_serve:
            return AfterRefusal.GIVE_UP
        return AfterRefusal.AGAIN
