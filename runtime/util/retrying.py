"""Retries with backoff. All retry delays and the only retry loop are here."""

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """Delays after consecutive failures: exponential, with an upper bound.

    Each delay is drawn from the upper half of the interval, so that processes that fail together do not retry together.
    """

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after this number of consecutive failures, from 1."""
        doublings = min(max(0, failures - 1), 64)
        longest_s = min(self.max_s, self.first_s * 2.0**doublings)
        return longest_s * random.uniform(0.5, 1.0)


DEFAULT_BACKOFF = Backoff()
FOR_EVER = math.inf  # value of `times` if the caller ends the retries: by a deadline or by cancellation


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    times: float,
    failed: Callable[[Exception, int], None] = lambda error, failures: None,
    backoff: Backoff = DEFAULT_BACKOFF,
) -> T:
    """Return the result of an attempt, and retry it after errors of the given types.

    Args:
        on: error types to retry; others are raised at once.
        times: maximum number of attempts; the last one's error is raised. FOR_EVER if the caller ends the retries.
        failed: called before each retry with the error and the number of consecutive failures. It may raise to stop.
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
