"""Inputs of estimators: their shapes are checked, and sums go by sample."""

from typing import Any

import numpy as np
import pytest

from actors.trainer.algorithms.advantage_inputs import sample_sums
from tests.build.advantages import advantage_inputs


def test_sums_go_by_sample_and_an_empty_sample_has_0() -> None:
    found = sample_sums(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 3, 0, 1, 0]))
    assert found.tolist() == [0.0, 6.0, 0.0, 4.0, 0.0]
    assert sample_sums(np.empty(0), np.array([0, 0])).tolist() == [0.0, 0.0]


def test_mask_sums_and_spread() -> None:
    inputs = advantage_inputs([2, 1], loss_mask=[1, 0, 1])
    assert inputs.mask_sums.tolist() == [1, 1]
    assert inputs.spread(np.array([5.0, 7.0])).tolist() == [5.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"kl": np.zeros(2)}, r"kl has shape \(2,\), expected \(3,\)"),
        ({"values": np.zeros((3, 1))}, r"values has shape \(3, 1\), expected \(3,\)"),
        ({"rewards": np.zeros(3)}, r"rewards has shape \(3,\), expected \(2,\)"),
        ({"named_rewards": {"length": np.zeros(3)}}, r"named_rewards\['length'\] has shape \(3,\), expected \(2,\)"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        advantage_inputs([2, 1], **columns)


def test_inputs_are_frozen() -> None:
    inputs: Any = advantage_inputs([1])
    with pytest.raises(AttributeError):
        inputs.kl = np.zeros(1)
