"""Whose turn it is to be updated: engines of one group, until all of them have had it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.target import RollingUpdate

ENGINES = ("e0", "e1", "e2", "e3")


def rolling(*waiting: str, groups: int = 2, names: Sequence[str] = ENGINES) -> RollingUpdate:
    made = RollingUpdate(groups, lambda: names)
    for engine in waiting:
        made.wait(engine)
    return made


def test_engines_of_one_group_go_together_and_those_of_others_wait_for_them() -> None:
    turns = rolling(*ENGINES)
    assert [turns.take(engine) for engine in ENGINES] == [True, False, True, False]
    turns.leave("e0")
    assert not turns.take("e1")
    turns.leave("e2")
    assert [turns.take(engine) for engine in ("e1", "e3")] == [True, True]


def test_one_that_wants_newer_weights_lets_a_group_go_first_that_has_none() -> None:
    turns = rolling("e0", "e1")
    assert turns.take("e0")
    turns.leave("e0")
    turns.wait("e0")
    assert not turns.take("e0")
    assert turns.take("e1")
    turns.leave("e1")
    assert turns.take("e0")


def test_one_that_is_lost_in_line_or_in_an_update_holds_up_nobody() -> None:
    turns = rolling(*ENGINES)
    assert turns.take("e0")
    turns.leave("e2")
    turns.leave("e0")
    assert turns.take("e1")


@given(st.integers(1, 5), st.lists(st.sampled_from([f"e{index}" for index in range(5)]), max_size=60))
def test_whoever_comes_in_whatever_order_two_groups_are_never_at_work_and_all_have_their_turn(
    groups: int, calls: list[str]
) -> None:
    names = [f"e{index}" for index in range(5)]
    turns, waiting, at_work = rolling(groups=groups, names=names), set[str](), set[str]()
    for engine in calls:  # the next thing that an engine may do
        if engine in at_work:
            turns.leave(engine)
            at_work.remove(engine)
        elif engine in waiting:
            if turns.take(engine):
                waiting.remove(engine)
                at_work.add(engine)
        else:
            turns.wait(engine)
            waiting.add(engine)
        assert len({turns.group_of(each) for each in at_work}) <= 1
    for _ in names:
        for engine in sorted(at_work):
            turns.leave(engine)
        at_work = {engine for engine in sorted(waiting) if turns.take(engine)}
        waiting -= at_work
    assert not waiting
