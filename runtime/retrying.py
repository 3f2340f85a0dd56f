"""Trying again: the only place that says how long to wait in between, and the only loop that does so."""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """How long to wait after failures in a row: doubled with each, up to a bound.

    Each pause is drawn from the upper half of that, so that many who fail together do not come back together.
    """

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, from 1."""
        doublings = min(max(0, failures - 1), 64)
        longest_s = min(self.max_s, self.first_s * 2.0**doublings)
        return longest_s * random.uniform(0.5, 1.0)


DEFAULT_BACKOFF = Backoff()
FOR_EVER = math.inf  # times, where an end comes from outside: a deadline around the call, or its cancellation


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    times: float,
    failed: Callable[[Exception, int], None] = lambda error, failures: None,
    backoff: Backoff = DEFAULT_BACKOFF,
) -> T:
    """What an attempt returns, tried again after each failure of a kind.

    Args:
        times: attempts, after the last of which its error is raised; FOR_EVER if the caller has another end.
        failed: told of each failure that is followed by another attempt, and how many there were in a row; it may raise
            to end the attempts.
    """
    failures = 0
    while True:
        try:
            return await attempt()
        except on as error:
            failures += 1
            if failures >= times:
                raise
            failed(error, failures)
        await anyio.sleep(backoff.pause_s(failures))
