"""pass@k by hand, and against all choices of k samples."""

from itertools import combinations

import pytest

from runtime.util.pass_rate import pass_rates


def test_pass_rates_by_hand() -> None:
    assert pass_rates([(4, 1)]) == pytest.approx({1: 0.25, 2: 0.5, 4: 1.0})
    assert pass_rates([(4, 1), (4, 0)]) == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})


def test_pass_rates_count_the_choices_that_hold_a_passing_sample() -> None:
    for n in range(2, 7):
        for correct in range(n + 1):
            passes = [sample < correct for sample in range(n)]
            for k, rate in pass_rates([(n, correct)]).items():
                chosen = [any(some) for some in combinations(passes, k)]
                assert rate == pytest.approx(sum(chosen) / len(chosen))


def test_the_smallest_group_limits_k_and_one_sample_has_no_rate() -> None:
    assert list(pass_rates([(8, 1), (3, 0)])) == [1, 2]
    assert pass_rates([(1, 1), (8, 1)]) == {}
    assert pass_rates([]) == {}
