"""Where the time of a train step goes."""

import time


class Laps:
    """Seconds by part. A lap is what passed since the lap before, or the start, so that all of them are the whole."""

    def __init__(self) -> None:
        """Start."""
        self._last = self._begin = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Count what passed to a part, and say how much it was."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._seconds[name] = self._seconds.get(name, 0.0) + took
        return took

    @property
    def total(self) -> float:
        """Seconds up to the last lap."""
        return self._last - self._begin

    def metrics(self) -> dict[str, float]:
        """By name of the metric."""
        return dict(self._seconds)
