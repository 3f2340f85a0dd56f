"""Which engines are to blame for answers that cannot be used."""

from actors.rollout.engines.failures import FAILING_FOR_S, RequestOutcomes


def failing(outcomes: RequestOutcomes, engine: str, *groups: str, counts: bool = True) -> None:
    for group in groups:
        outcomes.failed(engine, group, "it broke", 1.0, counts=counts)


def keeps_failing(outcomes: RequestOutcomes, engine: str, after_s: float = FAILING_FOR_S) -> bool:
    """Whether it does so long after the failures began."""
    return outcomes.keeps_failing(engine, 1.0 + after_s)


def test_five_failures_in_a_row_of_several_prompt_groups_are_the_engines() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", "g", "g", "h", "g")
    assert not keeps_failing(outcomes, "a")
    failing(outcomes, "a", "g")
    assert keeps_failing(outcomes, "a")
    assert outcomes.reason("a") == "it broke"
    assert not keeps_failing(outcomes, "b")


def test_a_good_answer_in_between_begins_the_row_anew() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", "g", "h", "g", "h")
    outcomes.answered("a", 10.0)
    assert outcomes.answers("a")
    failing(outcomes, "a", "g")
    assert not outcomes.answers("a")
    assert not keeps_failing(outcomes, "a")


def test_one_prompt_group_alone_proves_nothing_against_an_engine() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", *["g"] * 20)
    failing(outcomes, "b", *["g"] * 20)
    assert not keeps_failing(outcomes, "a")
    assert outcomes.fails_alone("g")
    failing(outcomes, "b", "h")
    assert not outcomes.fails_alone("g")


def test_a_busy_engine_is_not_blamed_and_has_not_answered() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", *"ghghghgh", counts=False)
    assert not keeps_failing(outcomes, "a")
    assert not outcomes.answers("a")
    assert not outcomes.any_answered_since(0.0)


def test_a_queue_that_was_full_for_another_prompt_group_adds_no_blame() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", "h", counts=False)
    failing(outcomes, "a", *["g"] * 20)
    assert not keeps_failing(outcomes, "a")
    failing(outcomes, "a", "h")
    assert keeps_failing(outcomes, "a")


def test_samples_of_two_prompts_that_fail_at_one_moment_say_nothing_of_an_engine_that_answers_others() -> None:
    outcomes = RequestOutcomes()
    failing(outcomes, "a", *"gggghhhh")
    assert not keeps_failing(outcomes, "a", after_s=4.0)
    outcomes.answered("a", 2.0)
    assert not keeps_failing(outcomes, "a")


def test_an_engine_that_was_asked_nothing_yet_has_not_answered() -> None:
    assert not RequestOutcomes().answers("a")
