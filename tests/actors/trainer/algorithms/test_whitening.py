"""Whitening: by hand, with large offsets, and its edges."""

import numpy as np
import pytest

from actors.trainer.algorithms.group_baselines import grpo_advantages
from actors.trainer.algorithms.whitening import whiten
from tests.actors.trainer.algorithms.peers import GROUPS, LENGTHS, REWARDS, VERL


def test_whitening_by_hand() -> None:
    """Mean 2 and variance (1 + 0 + 1) / 2 = 1 of the first three; the last one does not train."""
    found = whiten(np.array([1.0, 2.0, 3.0, 10.0]), np.array([1, 1, 1, 0], dtype=bool))
    assert found == pytest.approx(np.array([-1.0, 0.0, 1.0, 8.0]), rel=1e-7)


@pytest.mark.parametrize(("dtype", "offset", "tolerance"), [(np.float64, 1e6, 1e-6), (np.float32, 1e3, 1e-3)])
def test_an_offset_loses_no_digits(dtype: type, offset: float, tolerance: float) -> None:
    values = np.random.default_rng(0).normal(0, 1, 5000)
    mask = np.arange(5000) % 7 > 0
    exact = (values - values[mask].mean()) / values[mask].std(ddof=1)
    assert np.abs(whiten((values + offset).astype(dtype), mask) - exact)[mask].max() < tolerance


@pytest.mark.parametrize("value", [0.1, 0.7, 1e9])
def test_equal_values_are_exactly_0(value: float) -> None:
    assert whiten(np.full(12, value), np.ones(12, dtype=bool)).tolist() == [0.0] * 12


def test_without_masked_tokens_values_stay_and_one_is_0() -> None:
    assert whiten(np.array([3.0, 4.0]), np.zeros(2, dtype=bool)).tolist() == [3.0, 4.0]
    assert whiten(np.array([3.0, 4.0]), np.array([True, False]))[0] == 0.0
    assert whiten(np.empty(0), np.empty(0, dtype=bool)).tolist() == []


def test_a_value_that_is_not_finite_spoils_no_other() -> None:
    found = whiten(np.array([1.0, np.nan, 3.0, np.inf]), np.ones(4, dtype=bool))
    np.testing.assert_allclose(found, [-(0.5**0.5), np.nan, 0.5**0.5, np.inf], rtol=1e-7)


def test_the_baseline_of_reinforce_plus_plus_is_that_of_verl() -> None:
    centred = grpo_advantages(REWARDS, GROUPS, np.arange(len(REWARDS)), normalize_std=False)
    found = whiten(np.repeat(centred, LENGTHS), np.ones(sum(LENGTHS), dtype=bool))
    first = np.cumsum([0, *LENGTHS[:-1]])
    assert found[first] == pytest.approx(VERL["advantages"]["reinforce_plus_plus_baseline"], abs=1e-6)
