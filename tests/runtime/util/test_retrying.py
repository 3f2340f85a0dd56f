"""Trying again, with pauses."""

import math

import anyio
import pytest

from runtime.util.retrying import FOR_EVER, Backoff, retried

pytestmark = pytest.mark.anyio
AT_ONCE = Backoff(first_s=0.0, max_s=0.0)


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise LookupError(f"attempt {self.attempts}")
        return "answer"


@pytest.mark.parametrize("failures", [1, 2, 3, 7, 2000])
def test_a_pause_is_drawn_from_the_upper_half_of_what_doubles_up_to_its_bound(failures: int) -> None:
    longest_s = {1: 0.1, 2: 0.2, 3: 0.4, 7: 5.0, 2000: 5.0}[failures]
    drawn = [Backoff(first_s=0.1, max_s=5.0).pause_s(failures) for _ in range(200)]
    assert longest_s / 2 <= min(drawn) < 0.6 * longest_s
    assert 0.9 * longest_s < max(drawn) <= longest_s


async def test_it_is_tried_until_it_succeeds_and_each_failure_is_told() -> None:
    told: list[tuple[str, int]] = []
    flaky = Flaky(3)
    answer = await retried(
        flaky, on=LookupError, times=4, failed=lambda e, n: told.append((str(e), n)), backoff=AT_ONCE
    )
    assert answer == "answer"
    assert told == [("attempt 1", 1), ("attempt 2", 2), ("attempt 3", 3)]


async def test_the_last_failure_is_raised() -> None:
    flaky = Flaky(math.inf)
    with pytest.raises(LookupError, match="attempt 4"):
        await retried(flaky, on=LookupError, times=4, backoff=AT_ONCE)
    assert flaky.attempts == 4


async def test_another_error_is_not_tried_again() -> None:
    flaky = Flaky(math.inf)
    with pytest.raises(LookupError, match="attempt 1"):
        await retried(flaky, on=OSError, times=FOR_EVER, backoff=AT_ONCE)


async def test_who_is_told_may_end_it_and_so_does_a_deadline_around_it() -> None:
    def give_up(error: Exception, failures: int) -> None:
        if failures == 2:
            raise TimeoutError from error

    with pytest.raises(TimeoutError):
        await retried(Flaky(math.inf), on=LookupError, times=FOR_EVER, failed=give_up, backoff=AT_ONCE)
    with anyio.move_on_after(0.05) as scope:
        await retried(Flaky(math.inf), on=LookupError, times=FOR_EVER)
    assert scope.cancelled_caught
