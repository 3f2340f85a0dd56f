"""What is told of engines, and how seldom one that comes and goes is."""

from actors.rollout.engines.rate_limited_events import BURST, FIRST_REFUSAL_S, REFILL_S, Refusals, TokenBucket


def test_changes_are_told_as_they_come_until_there_are_too_many() -> None:
    allowance = TokenBucket()
    assert [allowance.take(0.0) for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert allowance.num_suppressed == 2
    assert not allowance.take(REFILL_S / 2)
    assert allowance.take(REFILL_S)
    assert not allowance.take(REFILL_S)


def test_an_engine_that_flaps_for_a_day_is_told_of_once_a_minute() -> None:
    allowance = TokenBucket()
    told = sum(allowance.take(float(second)) for second in range(86_400))
    assert told == BURST + 1_439


def test_refusals_are_told_at_once_and_then_more_and_more_seldom() -> None:
    refusals = Refusals(version=3)
    told = [second for second in range(200) if refusals.take(float(second))]
    assert told == [0, 10, 30, 70, 150]
    assert refusals.number == 200
    assert told[1] <= FIRST_REFUSAL_S
