"""Items are shared out equally, and their costs nearly so."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.data.balance import shared_out


@st.composite
def works(draw: st.DrawFn) -> tuple[list[int], int]:
    """Costs of items that can be shared out, and among how many."""
    shares = draw(st.integers(1, 5))
    number = shares * draw(st.integers(0, 8))
    return draw(st.lists(st.integers(0, 1000), min_size=number, max_size=number)), shares


def spread(costs: list[int], shares: list[list[int]]) -> int:
    sums = [sum(costs[item] for item in items) for items in shares]
    return max(sums) - min(sums)


@given(works())
def test_every_item_is_in_one_share_and_shares_have_equally_many(work: tuple[list[int], int]) -> None:
    costs, number = work
    shares = shared_out(costs, number)
    assert [len(items) for items in shares] == [len(costs) // number] * number
    assert sorted(item for items in shares for item in items) == list(range(len(costs)))


@given(works())
def test_sums_differ_no_more_than_neighbours_do_and_never_more_than_dealt_in_turn(work: tuple[list[int], int]) -> None:
    costs, number = work
    found, ordered = spread(costs, shared_out(costs, number)), sorted(costs, reverse=True)
    stretches = [ordered[begin : begin + number] for begin in range(0, len(ordered), number)]
    assert found <= max((stretch[0] - stretch[-1] for stretch in stretches), default=0)
    dealt = sorted(range(len(costs)), key=lambda item: -costs[item])
    assert found <= spread(costs, [dealt[share::number] for share in range(number)])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5).map(lambda half: half + half[::-1]))
def test_of_two_shares_the_sums_are_near_the_best(costs: list[int]) -> None:
    best = min(
        abs(sum(costs) - 2 * sum(costs[item] for item in items))
        for items in combinations(range(len(costs)), len(costs) // 2)
    )
    assert best == 0  # each cost is there twice
    assert spread(costs, shared_out(costs, 2)) <= max(costs) - min(costs)


def test_shares_by_hand() -> None:
    """Dealt in turn these are 8 + 6 + 4 and 7 + 5 + 1; pairs that differ by 1, 1 and 3 leave 1 + 1 - 3."""
    assert spread([8, 7, 6, 5, 4, 1], shared_out([8, 7, 6, 5, 4, 1], 2)) == 1


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="3 items cannot be shared out equally among 2"):
        shared_out([1, 2, 3], 2)
