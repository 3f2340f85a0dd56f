"""What follows when an engine refuses weights, by hand."""

from functools import partial

from actors.rollout.engines.failures import (
    DAMAGED_PATIENCE_S,
    MAX_RESTARTS_BESIDE,
    REFUSED_PATIENCE_S,
    RESTART_AFTER,
    RESTART_AFTER_S,
    AfterRefusal,
    RefusalCounter,
)

ALONE = {"damaged": False, "may_restart": True, "mismatch": False, "others_hold": False}


def refusals(
    number: int, *, within_s: float, begin: float = 0.0, by: RefusalCounter | None = None, **said: bool
) -> AfterRefusal:
    """What follows from the last of so many refusals, evenly over a time."""
    engine = by or RefusalCounter()
    step = AfterRefusal.AGAIN
    for index in range(number):
        step = engine.refused(begin + within_s * index / (number - 1), **(ALONE | said))
    return step


def test_an_engine_that_goes_on_refusing_is_started_again_also_the_only_one() -> None:
    for others_hold in (False, True):
        assert refusals(30, within_s=RESTART_AFTER_S, others_hold=others_hold) is AfterRefusal.AGAIN
        after = RESTART_AFTER_S + 1
        assert refusals(RESTART_AFTER, within_s=after, others_hold=others_hold) is AfterRefusal.RESTART


def test_the_only_engine_is_started_again_and_then_given_up() -> None:
    engine = RefusalCounter()
    assert refusals(5, within_s=RESTART_AFTER_S + 1, by=engine) is AfterRefusal.RESTART
    assert refusals(5, within_s=RESTART_AFTER_S + 1, begin=100, by=engine) is AfterRefusal.AGAIN
    assert refusals(2, within_s=1, begin=100 + REFUSED_PATIENCE_S + 1, by=engine) is AfterRefusal.GIVE_UP


def test_a_fresh_process_whose_weights_are_not_verified_either_ends_the_run_at_once() -> None:
    """Within 2 minutes, if it starts within 90 s."""
    engine = RefusalCounter()
    assert refusals(5, within_s=RESTART_AFTER_S + 1, by=engine, mismatch=True) is AfterRefusal.RESTART
    begin = RESTART_AFTER_S + 1 + 90
    assert refusals(5, within_s=RESTART_AFTER_S, begin=begin, by=engine, mismatch=True) is AfterRefusal.AGAIN
    ends_at = begin + RESTART_AFTER_S + 1
    assert engine.refused(ends_at, **(ALONE | {"mismatch": True})) is AfterRefusal.GIVE_UP
    assert ends_at < 120
    external = partial(refusals, 5, may_restart=False, mismatch=True)
    assert external(within_s=REFUSED_PATIENCE_S) is AfterRefusal.AGAIN
    assert external(within_s=REFUSED_PATIENCE_S + 1) is AfterRefusal.GIVE_UP


def test_two_slow_refusals_do_not_give_an_engine_up() -> None:
    engine = RefusalCounter()
    assert refusals(2, within_s=REFUSED_PATIENCE_S + 30, by=engine) is AfterRefusal.AGAIN
    assert engine.refused(REFUSED_PATIENCE_S + 31, **ALONE) is AfterRefusal.RESTART


def test_the_third_process_that_refuses_what_others_hold_is_dropped() -> None:
    for mismatch in (False, True):
        engine, begin = RefusalCounter(), 0.0
        refuse = partial(refusals, 5, within_s=RESTART_AFTER_S + 1, by=engine, others_hold=True, mismatch=mismatch)
        assert [refuse(begin=100.0 * number) for number in range(MAX_RESTARTS_BESIDE + 1)] == [
            *[AfterRefusal.RESTART] * MAX_RESTARTS_BESIDE,
            AfterRefusal.DROP,
        ]
        engine.took()
        assert refuse(begin=begin + 1000) is AfterRefusal.RESTART


def test_one_that_cannot_be_started_again_is_given_up_where_nobody_serves() -> None:
    refuse = partial(refusals, 100, may_restart=False)
    assert refuse(within_s=REFUSED_PATIENCE_S) is AfterRefusal.AGAIN
    assert refuse(within_s=REFUSED_PATIENCE_S + 1) is AfterRefusal.GIVE_UP
    assert refuse(within_s=100 * REFUSED_PATIENCE_S, others_hold=True) is AfterRefusal.AGAIN


def test_damaged_weights_are_waited_out_and_nothing_is_started_again() -> None:
    refuse = partial(refusals, 100, damaged=True)
    assert refuse(within_s=DAMAGED_PATIENCE_S) is AfterRefusal.WAIT
    assert refuse(within_s=DAMAGED_PATIENCE_S + 1) is AfterRefusal.GIVE_UP
    assert refuse(within_s=DAMAGED_PATIENCE_S + 1, others_hold=True) is AfterRefusal.WAIT


def test_what_an_engine_refused_before_it_served_or_was_away_does_not_count() -> None:
    for forget in (RefusalCounter.took, RefusalCounter.away):
        engine = RefusalCounter()
        assert refusals(5, within_s=RESTART_AFTER_S, by=engine) is AfterRefusal.AGAIN
        forget(engine)
        assert refusals(2, within_s=1, begin=RESTART_AFTER_S + 1, by=engine) is AfterRefusal.AGAIN
