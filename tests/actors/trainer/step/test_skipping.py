"""Losses and gradients that are not finite, and those that are 0: what moves, what is masked, what ends the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.skipped import gradients_of
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.metrics import DIFF, DIFF_MAX
from actors.trainer.step.train_step import TrainStep
from messages import UntrainedSamples
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save_checkpoint


def trainer(topology: Topology) -> tuple[TrainStep, Replica]:
    replica = Replica(topology, torch.device("cpu"))
    return TrainStep(topology, replica), replica


def poisoned(batch: TrainBatch, *groups: int) -> TrainBatch:
    """Rewards that are no number in some groups; all groups if none is named."""
    bad_B = np.isin(batch.groups_B, groups or batch.groups_B)
    return replace(batch, rewards_B=np.where(bad_B, np.nan, batch.rewards_B))


def state_of(replica: Replica) -> list[Tensor]:
    """Weights, the optimizer's copies of them, moments and counts of steps."""
    found = [parameter.detach().clone() for parameter in replica.chunks[0].parameters()]
    for part in replica.optimizer.chained_optimizers:
        for parameter in part.get_parameters():
            found.append(parameter.detach().clone())
            state: dict[str, Any] = part.optimizer.state[parameter]
            found += [state[name].clone() for name in sorted(state)]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_a_finite_gradient_changes_nothing(make_topology: MakeTopology, dtype: str) -> None:
    step, replica = trainer(make_topology(model={"dtype": dtype}))
    step(random_batch(0))
    before = state_of(replica)
    trained = step(poisoned(random_batch(1)))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))
    assert trained.metrics["train/num_skipped_steps"] == 2
    assert sorted(trained.skipped.tolist()) == list(range(len(random_batch(1).lengths_B)))


def test_a_run_goes_on_after_a_skipped_step_as_if_it_had_not_been(make_topology: MakeTopology) -> None:
    """The learning rate is constant, so the same batches give the same weights."""
    topology = make_topology(train={"num_steps": 8})
    (one, left), (other, right) = trainer(topology), trainer(topology)
    one(random_batch(0))
    other(random_batch(0))
    one(poisoned(random_batch(1)))
    one(random_batch(2))
    other(random_batch(2))
    assert all(torch.equal(a, b) for a, b in zip(state_of(left), state_of(right), strict=True))


def with_loss_masked(batch: TrainBatch, sample: int) -> TrainBatch:
    """No token of a sample trains."""
    masked_N = np.repeat(np.arange(len(batch.lengths_B)) == sample, batch.lengths_B)
    return replace(batch, loss_mask_N=np.where(masked_N, 0, batch.loss_mask_N).astype(np.uint8))


def with_reward(batch: TrainBatch, sample: int, reward: float) -> TrainBatch:
    return replace(batch, rewards_B=np.where(np.arange(len(batch.lengths_B)) == sample, reward, batch.rewards_B))


def with_log_prob(batch: TrainBatch, sample: int, log_prob: float) -> TrainBatch:
    """The first token of a sample that trains has it."""
    first = int(np.flatnonzero(batch.loss_mask_N[batch.starts_B[sample] :])[0] + batch.starts_B[sample])
    column_N = batch.rollout_log_probs_N.astype(np.float64)
    column_N[first] = log_prob
    with np.errstate(over="ignore"):
        return replace(batch, rollout_log_probs_N=column_N.astype(np.float32))


BAD = 7  # one of two parts of its rollout; its advantage is negative
RAW: dict[str, Any] = {"estimator": {"type": "grpo", "normalize": False}}
OF_ENGINE: dict[str, Any] = {"use_rollout_logprobs": True}
CAUSES: dict[str, tuple[dict[str, Any], Callable[[TrainBatch], TrainBatch]]] = {
    "a reward of 1e30": (RAW, lambda batch: with_reward(batch, BAD, 1e30)),
    "a reward of 1e300": (RAW, lambda batch: with_reward(batch, BAD, 1e300)),
    "a reward that is NaN": (RAW, lambda batch: with_reward(batch, BAD, np.nan)),
    "a log-prob of -1e39": (OF_ENGINE, lambda batch: with_log_prob(batch, BAD, -1e39)),
    "a log-prob that is NaN": (OF_ENGINE, lambda batch: with_log_prob(batch, BAD, np.nan)),
    "a ratio that overflows": (
        OF_ENGINE | {"max_log_ratio": 80.0},
        lambda batch: with_log_prob(batch, BAD, -200.0),
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_sample_without_a_finite_loss_trains_as_if_its_tokens_were_masked(
    make_topology: MakeTopology, cause: str, per_token: bool, packed: bool
) -> None:
    algorithm, spoilt = CAUSES[cause]
    topology = make_topology(
        algorithm={
            "num_steps_per_rollout": 2,
            "entropy_coef": 0.05,
            "reduction": {"type": "token-mean" if per_token else "rollout-mean"},
        }
        | algorithm,
        train={"num_steps": 8, "max_tokens_per_gpu": 60},
        trainer={"packed": packed},
        optimizer={"adam_eps": 1e-3},  # at less the rounding of some CPUs moves weights by 1e-6
    )
    (one, left), (other, right) = trainer(topology), trainer(topology)
    batch = random_batch(0)
    assert batch.mask_sums_B[BAD] > 0
    found, expected = one(spoilt(batch)), other(with_loss_masked(batch, BAD))
    assert (found.masked.tolist(), found.skipped.tolist()) == ([BAD], [])
    for name in (
        "train/loss",
        "train/pg_loss",
        "train/entropy_loss",
        "train/ppo_kl",
        "train/grad_norm",
        DIFF,
        DIFF_MAX,
    ):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-6), name
    assert found.metrics["rollout/advantages"] == pytest.approx(expected.metrics["rollout/advantages"])
    assert found.metrics["train/num_skipped_steps"] == 0
    for found_tensor, expected_tensor in zip(state_of(left), state_of(right), strict=True):
        torch.testing.assert_close(found_tensor, expected_tensor, rtol=0, atol=1e-6)


def test_a_reward_that_is_not_finite_is_no_vote_in_its_group(make_topology: MakeTopology) -> None:
    """The others' advantages are those of a group without it."""
    topology = make_topology(algorithm={"num_steps_per_rollout": 1})
    step, _ = trainer(topology)
    with structlog.testing.capture_logs() as logs:
        trained = step(with_reward(random_batch(0), BAD, np.inf))
    assert trained.masked.tolist() == [BAD]
    assert np.isfinite(list(trained.metrics.values())).all()
    (entry,) = [entry for entry in logs if entry["event"] == "samples_masked"]
    assert entry["samples"] == ["group 1, sample 1, part 1"]


def test_the_optimizer_steps_of_a_batch_that_are_finite_are_taken(make_topology: MakeTopology) -> None:
    step, replica = trainer(make_topology(algorithm={"num_steps_per_rollout": 4}))
    step(random_batch(0))
    before = state_of(replica)
    batch = poisoned(random_batch(1), 2)
    trained = step(batch)
    assert trained.skipped.tolist() == np.flatnonzero(batch.groups_B == 2).tolist()
    assert trained.metrics["train/num_skipped_steps"] == 1
    assert np.isfinite(trained.metrics["train/grad_norm"])
    assert not all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_advantages_of_0_move_nothing_and_count_as_no_skipped_step(make_topology: MakeTopology, dtype: str) -> None:
    """Weights would decay, and follow the momentum of earlier steps."""
    train = {"num_steps": 8, "max_skipped": 0, "max_skipped_share": 0.0}
    step, replica = trainer(make_topology(model={"dtype": dtype}, train=train, optimizer={"lr_warmup_iters": 8}))
    step(random_batch(0))
    before = state_of(replica)
    batch = random_batch(1)
    trained = step(replace(batch, rewards_B=np.ones_like(batch.rewards_B)))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))
    assert (trained.metrics["train/num_skipped_steps"], trained.metrics["train/grad_norm"]) == (0, 0.0)
    assert (len(trained.skipped), len(trained.masked)) == (0, 0)
    assert trained.metrics["train/lr-pg_0"] == pytest.approx(1e-2 * 4 / 8)  # of the fourth optimizer step
    step(random_batch(2))
    assert not all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))


def test_samples_that_left_no_gradient_have_names(make_topology: MakeTopology) -> None:
    batch = random_batch()  # 4 groups of 4; rollouts 0, 5, 10 and 15 have two parts
    skipped, masked = np.flatnonzero(batch.rollouts_B < 5), np.flatnonzero(batch.rollouts_B == 5)
    gradients = gradients_of(batch, np.concatenate([skipped, masked]))
    assert gradients.skipped_samples == (
        UntrainedSamples(group_id=0, reason="not_finite", samples=((0, 0), (0, 1), (1, 0), (2, 0), (3, 0))),
        UntrainedSamples(group_id=1, reason="not_finite", samples=((0, 0), (1, 0), (1, 1))),
    )
    assert gradients.skipped_groups == (0,)
    left_B = batch.rollouts_B >= 6
    assert (gradients.num_samples, gradients.num_tokens) == (left_B.sum(), batch.lengths_B[left_B].sum())


def test_on_nonfinite_fail_ends_before_anything_moves(make_topology: MakeTopology) -> None:
    step, replica = trainer(make_topology(train={"num_steps": 8, "on_nonfinite": "fail"}))
    step(random_batch(0))
    before = state_of(replica)
    with pytest.raises(
        InputError, match=r"step 1 of train step 2: the loss is not finite.* group 0, sample 0, part 0;"
    ):
        step(poisoned(random_batch(1)))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))


def test_so_many_steps_in_a_row_are_skipped_and_no_more_over_a_restart_too(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 8, "max_skipped": 3})  # two optimizer steps a batch
    step, replica = trainer(topology)
    step(poisoned(random_batch(0)))
    step(random_batch(1))
    assert replica.skips.in_a_row == 0
    step(poisoned(random_batch(2)))
    path = save_checkpoint(replica, tmp_path, step=3, incarnation=1)
    resumed_step, resumed = trainer(topology)
    load_checkpoint(resumed, path)
    with pytest.raises(InputError, match=r"4 in a row; train.max_skipped = 3 are allowed"):
        resumed_step(poisoned(random_batch(3)))


def test_more_than_a_share_of_the_last_steps_end_the_run_over_a_restart_too(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    """Each batch loses one of its two optimizer steps, so that never two in a row are lost."""
    topology = make_topology(train={"num_steps": 8, "max_skipped": 1})
    step, replica = trainer(topology)
    for number in range(3):
        step(poisoned(random_batch(number), 2, 3))
    path = save_checkpoint(replica, tmp_path, step=3, incarnation=1)
    resumed_step, resumed = trainer(topology)
    load_checkpoint(resumed, path)
    for number in (3, 4):
        resumed_step(poisoned(random_batch(number), 2, 3))
    named = r"6 of the last 20 optimizer steps; train.max_skipped_share = 0.25 of train.skip_window = 20 allows 5"
    with pytest.raises(InputError, match=named):
        resumed_step(poisoned(random_batch(5), 2, 3))


def test_log_ratios_beyond_what_can_be_exponentiated_leave_a_finite_gradient(make_topology: MakeTopology) -> None:
    step, _ = trainer(make_topology(algorithm={"use_rollout_logprobs": True, "num_steps_per_rollout": 1}))
    batch = random_batch()
    far = np.where(batch.loss_mask_N, -150.0, 0.0).astype(np.float32)
    trained = step(replace(batch, rollout_log_probs_N=far))
    assert not len(trained.skipped)
    assert np.isfinite(trained.metrics["train/grad_norm"])
