"""Which requests kill engines. Pure: who died when is found out elsewhere.

A request that was open at two engines when these died is a suspect, as are all that were there with it. Suspects are
sent one by one to an engine that has nothing else. Only one whose engine dies then, twice and not by somebody's kill,
is poison: its group fails, and all others go on.
"""

from enum import Enum
from typing import Final, NamedTuple

SUSPECT_AFTER: Final = 2  # deaths of engines that may have had it
POISON_AFTER: Final = 2  # deaths of engines that had it alone


class Standing(Enum):
    """What is to become of a request."""

    ORDINARY = "ordinary"  # it is sent with others
    SUSPECT = "suspect"  # it is sent alone
    POISON = "poison"  # it is not sent any more


class DeathRecord(NamedTuple):
    """What engines came to while they had a request."""

    deaths: int = 0
    alone: int = 0  # of them, while it was alone there and nobody killed the engine

    def after_death(self, *, alone: bool, killed: bool) -> "DeathRecord":
        """The record after one more engine died.

        Args:
            alone: it had nothing else of ours.
            killed: somebody outside ended it.
        """
        return DeathRecord(self.deaths + 1, self.alone + (alone and not killed))

    @property
    def standing(self) -> Standing:
        """What follows from it."""
        if self.alone >= POISON_AFTER:
            return Standing.POISON
        return Standing.SUSPECT if self.deaths >= SUSPECT_AFTER else Standing.ORDINARY
