"""Learning rate and entropy coefficient over a run, by hand."""

import pytest

from actors.trainer.algorithms.schedules import entropy_coef, learning_rate
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.training import OptimizerConfig


def rates(steps: list[int], **config: object) -> list[float]:
    return [learning_rate(OptimizerConfig(lr=1.0, **config), step, num_steps=10) for step in steps]  # type: ignore[arg-type]


def test_a_constant_rate_stays() -> None:
    assert rates([0, 5, 100]) == [1.0, 1.0, 1.0]


def test_warm_up_is_linear_and_begins_above_zero() -> None:
    assert rates([0, 1, 2, 3, 4], lr_warmup_iters=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_reaches_the_minimum_and_stays() -> None:
    result = rates([0, 5, 10, 20], lr_decay_style="linear", min_lr=0.2)
    assert result == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    result = rates([2, 6, 10], lr_decay_style="cosine", lr_warmup_iters=2, min_lr=0.2)
    assert result == pytest.approx([1.0, 0.6, 0.2])


def test_decay_may_end_before_the_run() -> None:
    assert rates([5, 9], lr_decay_style="linear", lr_decay_iters=5) == [0.0, 0.0]


def test_the_entropy_coefficient_falls_linearly_to_its_end_at_the_last_step() -> None:
    config = AlgorithmConfig(entropy_coef=0.1, entropy_coef_end=0.0)
    values = [entropy_coef(config, step, num_steps=5) for step in range(6)]
    assert values == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0])


def test_the_entropy_coefficient_is_constant_without_an_end() -> None:
    assert entropy_coef(AlgorithmConfig(entropy_coef=0.1), 3, num_steps=5) == 0.1


def test_a_run_of_one_step_uses_the_first_entropy_coefficient() -> None:
    config = AlgorithmConfig(entropy_coef=0.1, entropy_coef_end=0.0)
    assert entropy_coef(config, 0, num_steps=1) == 0.1


def test_the_entropy_coefficient_of_a_single_step_stays() -> None:
    config = AlgorithmConfig(entropy_coef=0.1, entropy_coef_end=0.0)
    assert [entropy_coef(config, step, num_steps=1) for step in (0, 3)] == [0.1, 0.1]
