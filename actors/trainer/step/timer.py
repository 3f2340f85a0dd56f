"""Step timer: wall time of a train step by part."""

import time


class Laps:
    """Seconds by part. A lap is the time since the previous lap or the start, so the laps add up to the total."""

    def __init__(self) -> None:
        """Start the timer."""
        self._last = self._begin = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Add the time since the previous lap to a part, and return it in seconds."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._seconds[name] = self._seconds.get(name, 0.0) + took
        return took

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._begin

    def metrics(self) -> dict[str, float]:
        """Seconds by metric name."""
        return dict(self._seconds)
