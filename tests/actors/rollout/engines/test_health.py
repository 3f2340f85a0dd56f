"""Which engines are to blame for answers that cannot be used."""

from actors.rollout.engines.health import FAILING_FOR_S, Conduct


def failing(conduct: Conduct, engine: str, *groups: str, counts: bool = True) -> None:
    for group in groups:
        conduct.failed(engine, group, "it broke", 1.0, counts=counts)


def keeps_failing(conduct: Conduct, engine: str, after_s: float = FAILING_FOR_S) -> bool:
    """Whether it does so long after the failures began."""
    return conduct.keeps_failing(engine, 1.0 + after_s)


def test_five_failures_in_a_row_of_several_prompt_groups_are_the_engines() -> None:
    conduct = Conduct()
    failing(conduct, "a", "g", "g", "h", "g")
    assert not keeps_failing(conduct, "a")
    failing(conduct, "a", "g")
    assert keeps_failing(conduct, "a")
    assert conduct.reason("a") == "it broke"
    assert not keeps_failing(conduct, "b")


def test_a_good_answer_in_between_begins_the_row_anew() -> None:
    conduct = Conduct()
    failing(conduct, "a", "g", "h", "g", "h")
    conduct.answered("a", 10.0)
    assert conduct.answers("a")
    failing(conduct, "a", "g")
    assert not conduct.answers("a")
    assert not keeps_failing(conduct, "a")


def test_one_prompt_group_alone_proves_nothing_against_an_engine() -> None:
    conduct = Conduct()
    failing(conduct, "a", *["g"] * 20)
    failing(conduct, "b", *["g"] * 20)
    assert not keeps_failing(conduct, "a")
    assert conduct.fails_alone("g")
    failing(conduct, "b", "h")
    assert not conduct.fails_alone("g")


def test_a_busy_engine_is_not_blamed_and_has_not_answered() -> None:
    conduct = Conduct()
    failing(conduct, "a", *"ghghghgh", counts=False)
    assert not keeps_failing(conduct, "a")
    assert not conduct.answers("a")
    assert not conduct.any_answered_since(0.0)


def test_a_queue_that_was_full_for_another_prompt_group_adds_no_blame() -> None:
    conduct = Conduct()
    failing(conduct, "a", "h", counts=False)
    failing(conduct, "a", *["g"] * 20)
    assert not keeps_failing(conduct, "a")
    failing(conduct, "a", "h")
    assert keeps_failing(conduct, "a")


def test_samples_of_two_prompts_that_fail_at_one_moment_say_nothing_of_an_engine_that_answers_others() -> None:
    conduct = Conduct()
    failing(conduct, "a", *"gggghhhh")
    assert not keeps_failing(conduct, "a", after_s=4.0)
    conduct.answered("a", 2.0)
    assert not keeps_failing(conduct, "a")


def test_an_engine_that_was_asked_nothing_yet_has_not_answered() -> None:
    assert not Conduct().answers("a")
