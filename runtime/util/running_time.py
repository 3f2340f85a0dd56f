"""How long a process was suspended, for example by SIGSTOP, so that a standstill is not taken for a timeout."""

from collections.abc import Callable
from math import inf
from typing import Final

LATE_S: Final = 0.25  # a tick later than this means that the process was suspended, not that it was busy


class RunningTime:
    """Measures the time in which this process was suspended, from late ticks."""

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        """Start without ticks.

        Args:
            clock: seconds that go on in a suspension.
            tick_s: seconds from a call of `tick` to the next one.
        """
        self._clock, self._tick_s = clock, tick_s
        self._lost_s, self._due = 0.0, inf  # up to the newest tick; time of the next one

    def tick(self) -> None:
        """Measure how late this tick is."""
        self._lost_s, self._due = self.lost_s, self._clock() + self._tick_s

    @property
    def lost_s(self) -> float:
        """Total seconds of suspension, including one that has just ended."""
        late_s = self._clock() - self._due
        return self._lost_s + (late_s if late_s > LATE_S else 0.0)
