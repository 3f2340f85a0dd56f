"""Identifies requests that crash engines. Pure: crashes are detected elsewhere.

A request that was open during two engine crashes is quarantined, as are all requests open with it. Quarantined requests
run one at a time on an engine without other requests (isolation run). Only a request whose engine then crashes twice,
without an external kill, is poison. Its group fails, and all others go on.
"""

from enum import Enum
from typing import Final, NamedTuple

QUARANTINE_AFTER: Final = 2  # engine crashes while the engine may have had the request
POISON_AFTER: Final = 2  # engine crashes in isolation runs


class RequestStatus(Enum):
    """Whether a request may run: normally, alone in an isolation run, or no more."""

    ORDINARY = "ordinary"  # it runs with others
    QUARANTINED = "quarantined"  # it runs in isolation
    POISON = "poison"  # it is never sent again


class DeathRecord(NamedTuple):
    """Engine crashes during one request."""

    deaths: int = 0
    alone: int = 0  # of these in isolation runs, without an external kill

    def after_death(self, *, alone: bool, killed: bool) -> "DeathRecord":
        """Return the record after one more engine crash.

        Args:
            alone: it was an isolation run.
            killed: the engine was killed from outside.
        """
        return DeathRecord(self.deaths + 1, self.alone + (alone and not killed))

    @property
    def status(self) -> RequestStatus:
        """The request's status."""
        if self.alone >= POISON_AFTER:
            return RequestStatus.POISON
        return RequestStatus.QUARANTINED if self.deaths >= QUARANTINE_AFTER else RequestStatus.ORDINARY
