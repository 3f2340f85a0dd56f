"""What to do about an engine that refuses weights: try again, wait for others, start it again, or give up. Pure."""

import math
from enum import Enum
from typing import Final

REFUSED_PATIENCE_S: Final = 60.0  # without any engine that takes weights; a trainer's restart may help
RESTART_AFTER_S: Final = 10.0  # of refusals, for an engine that the run started: its process may be what is wrong
RESTART_AFTER: Final = 3  # refusals, at least
MAX_RESTARTS: Final = 2  # of the only engine; the weights are what is wrong then
DAMAGED_PATIENCE_S: Final = 3600.0  # for a trainer that trains, and then publishes the same weights again


class Step(Enum):
    """What comes next."""

    AGAIN = "again"
    WAIT = "wait"  # for another version
    RESTART = "restart"
    GIVE_UP = "give up"


class RefusedBy:
    """The refusals of one engine since it last took weights, over its restarts."""

    def __init__(self) -> None:
        self._since = math.inf
        self._number = 0
        self._restarts = 0

    def took(self) -> None:
        """It serves."""
        self._restarts = 0
        self.away()

    def away(self) -> None:
        """It does not answer, or it is started again: earlier refusals say nothing of it any more."""
        self._since, self._number = math.inf, 0

    def refused(self, now: float, *, damaged: bool, may_restart: bool, others_serve: bool) -> Step:
        """Count a refusal.

        Args:
            now: seconds of any clock.
            damaged: the files of the weights are not what was announced: no engine can take them.
            may_restart: it can be started again, and its process may be what is wrong.
            others_serve: another engine holds the weights that this one refuses.
        """
        self._since, self._number = min(self._since, now), self._number + 1
        lasted_s = now - self._since
        if damaged:
            return Step.GIVE_UP if lasted_s > DAMAGED_PATIENCE_S and not others_serve else Step.WAIT
        tries_left = others_serve or self._restarts < MAX_RESTARTS
        if may_restart and tries_left and lasted_s > RESTART_AFTER_S and self._number >= RESTART_AFTER:
            self._restarts += 1
            self.away()
            return Step.RESTART
        if lasted_s > REFUSED_PATIENCE_S and not others_serve:
            return Step.GIVE_UP
        return Step.AGAIN
