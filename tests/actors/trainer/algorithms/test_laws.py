"""Laws of all estimators, losses, corrections and KL estimators, by the declared tables: new functions, too."""

from dataclasses import replace
from typing import Any, Final, get_args

import msgspec
import numpy as np
import pytest
import torch

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.algorithms.kl import FORMS, kl_divergence
from actors.trainer.algorithms.whitening import whiten
from actors.trainer.step.estimator import ESTIMATORS, token_advantages
from actors.trainer.step.objective import Objective
from runtime.settings.reading.config import type_of
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss
from tests.build.advantages import advantage_inputs
from tests.build.losses import inputs
from tests.grid.functions import CORRECTIONS, cases, types_of

SETTINGS: Final = {name.removeprefix("estimator "): given for name, given in cases().items() if "estimator" in name}
OF_GROUPS: Final = [name for name, estimate in ESTIMATORS.items() if estimate.needs("groups")]
OF_THE_BATCH: Final = ("gpg",)  # alpha counts the whole batch
LENGTHS: Final = (3, 2, 4, 1, 2, 3)
OBJECTIVES: Final = {name: given for name, given in cases().items() if name.startswith(("loss", "KL"))}


def settings_of(name: str, **changes: Any) -> AlgorithmConfig:
    """Settings of an estimator, without whitening, which sees the whole batch."""
    given = SETTINGS[name] | {"normalize_advantages": False} | changes
    return msgspec.convert(given, AlgorithmConfig)


def batch(rewards: Any, groups: Any, lengths: Any, **columns: Any) -> AdvantageInputs:
    """Samples with the columns that estimators read; all named rewards are the reward."""
    rewards = np.asarray(rewards)
    named = dict.fromkeys(("correct", "format"), rewards)
    more = {"kl": np.zeros(sum(lengths)), "values": np.zeros(sum(lengths)), "baseline_rewards": rewards}
    return advantage_inputs(lengths, rewards=rewards, groups=np.asarray(groups), named_rewards=named, **more | columns)


def estimated(name: str, given: AdvantageInputs, **changes: Any) -> np.ndarray:
    return token_advantages(given, settings_of(name, **changes), "zero").advantages


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_rewards_of_a_group_give_exactly_0(name: str, whitened: bool) -> None:
    for reward in (0.1, 0.3, 0.7, 0.9, -0.2, 1e6):
        for count in (1, 7, 12):
            for dtype in (np.float32, np.float64):
                rewards, groups = np.full(2 * count, reward, dtype=dtype), np.repeat([4, 9], count)
                found = estimated(name, batch(rewards, groups, [2] * 2 * count), normalize_advantages=whitened)
                assert found.tolist() == [0.0] * 4 * count, (reward, count, dtype)


@pytest.mark.parametrize("name", [name for name in OF_GROUPS if name not in OF_THE_BATCH])
def test_a_dropped_or_fanned_out_sample_changes_no_other_group(name: str) -> None:
    draw = np.random.default_rng(1)
    rewards, groups = draw.random(6), np.array([0, 1, 0, 1, 0, 1])
    whole = np.split(estimated(name, batch(rewards, groups, LENGTHS)), np.cumsum(LENGTHS)[:-1])
    dropped = estimated(name, batch(rewards[:5], groups[:5], LENGTHS[:5]))
    parts = np.array([*rewards, rewards[5]])
    fanned_out = batch(parts, [*groups, 1], [*LENGTHS, 2], rollouts=np.array([0, 1, 2, 3, 4, 5, 5]))
    for found in (dropped, estimated(name, fanned_out)):
        for place, own in enumerate(np.split(found, np.cumsum(LENGTHS)[:-1])[:5]):
            if groups[place] == 0:
                assert own.tolist() == pytest.approx(whole[place].tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    draw = np.random.default_rng(2)
    rewards, groups, baselines = draw.random(6), np.array([0, 1, 0, 1, 0, 1]), draw.random(6)
    order = draw.permutation(6)
    given = batch(rewards, groups, LENGTHS, baseline_rewards=baselines)
    moved = batch(
        rewards[order],
        groups[order],
        np.array(LENGTHS)[order],
        baseline_rewards=baselines[order],
        rollouts=order,
    )
    expected = np.split(estimated(name, given), np.cumsum(LENGTHS)[:-1])
    found = np.split(estimated(name, moved), np.cumsum(np.array(LENGTHS)[order])[:-1])
    for place, number in enumerate(order):
        assert found[place].tolist() == pytest.approx(expected[number].tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 3), (1,), (2, 2)], ids=str)
def test_an_estimator_has_a_number_for_each_token_of_any_batch(name: str, lengths: tuple[int, ...]) -> None:
    """No samples, an empty one, one token; and no token that trains."""
    total, count = sum(lengths), len(lengths)
    for mask in (np.ones(total), np.zeros(total)):
        given = batch(np.arange(count) / 2, np.zeros(count, dtype=np.int64), lengths, loss_mask=mask)
        found = estimated(name, given, normalize_advantages=True)
        assert found.shape == (total,)
        assert np.isfinite(found).all()


@pytest.mark.parametrize(("dtype", "offset", "tolerance"), [(np.float64, 1e6, 1e-6), (np.float32, 1e3, 1e-3)])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_whitened_advantages_do_not_depend_on_an_offset(
    name: str, dtype: type, offset: float, tolerance: float
) -> None:
    """The offset is in the advantages, as a reward without a group's mean has it."""
    draw = np.random.default_rng(3)
    plain = np.repeat(draw.random(64), 3)
    moved, mask = (plain + offset).astype(dtype), np.arange(192) % 5 > 0
    assert np.abs(whiten(moved, mask) - whiten(plain, mask)).max() < tolerance
    rewards, groups = draw.integers(0, 5, 64) / 4, np.arange(64) % 8
    if name not in ("maxrl", *OF_THE_BATCH):  # these depend on the size of rewards
        found = estimated(name, batch((rewards + offset).astype(dtype), groups, [3] * 64), normalize_advantages=True)
        expected = estimated(name, batch(rewards, groups, [3] * 64), normalize_advantages=True)
        assert np.abs(found - expected).max() < 5 * tolerance  # of a quotient


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
def test_a_whole_loss_and_its_gradient_are_finite_at_any_log_ratio(name: str, log_ratio: float) -> None:
    """In float32, of each column against each other, with advantages of both signs and 0; a metric counts the token."""
    objective = Objective(msgspec.convert(OBJECTIVES[name], AlgorithmConfig))
    for far in ("new", "old", "rollout", "ref"):
        columns = {column: torch.full((6,), -100.0) for column in ("new", "old", "rollout", "ref")}
        columns[far] = columns[far] + torch.tensor([log_ratio, 0.0] * 3)
        new = columns.pop("new").requires_grad_()
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
        given = inputs(new, columns["old"], advantages, rollout=columns["rollout"], ref=columns["ref"], lengths=[2] * 3)
        given = replace(given, rewards=torch.ones(6), trainer_log_probs=columns["old"])
        loss, metrics = objective(given, entropy_coef=0.0)
        loss.sum().backward()
        assert loss.isfinite().all(), far
        assert new.grad is not None
        assert new.grad.isfinite().all(), far
        assert all(values.isfinite().all() for values in metrics.values()), far


@pytest.mark.parametrize("estimator", FORMS)
def test_a_divergence_and_its_gradient_are_finite_and_smooth_where_it_is(estimator: Any) -> None:
    far = torch.tensor([-91.0, -1.0], requires_grad=True)
    kl_divergence(far, torch.tensor([-1.0, -91.0]), estimator, old_log_probs=far.detach() + 90.0).sum().backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()
    near = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64, requires_grad=True)
    reference, old = near.detach() + torch.tensor([0.4, 0.0, -0.7]), near.detach() + 0.1
    if not estimator.endswith("+"):  # then value and gradient are of two functions
        assert torch.autograd.gradcheck(lambda new: kl_divergence(new, reference, estimator), near)
        assert torch.autograd.gradcheck(lambda new: kl_divergence(new, reference, estimator, old_log_probs=old), near)


def test_every_declared_choice_is_walked() -> None:
    assert set(SETTINGS) == set(ESTIMATORS) == set(types_of(Estimator))
    losses = [type_of(table) for table in get_args(Loss) if table.learns_from == "samples"]
    assert {f"loss {name}" for name in losses if name != "custom"} <= set(OBJECTIVES)
    assert all(any(name.endswith(f", {correction}") for name in OBJECTIVES) for correction in CORRECTIONS)
    assert len(OF_GROUPS) >= 8
