"""Gradients that are no number: what such an optimizer step leaves, and what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.trainer.batches.batch import TrainBatch
from actors.trainer.batches.untrained import gradients_of
from actors.trainer.megatron.checkpoint import load_checkpoint, save_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from messages import UntrainedSamples
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import random_batch

MakeTopology = Callable[..., Topology]


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


def test_samples_that_left_no_gradient_have_names(make_topology: MakeTopology) -> None:
    batch = random_batch()  # 4 groups of 4; rollouts 0, 5, 10 and 15 have two parts
    gradients = gradients_of(batch, np.flatnonzero(batch.rollouts_B < 6))
    assert gradients.untrained == (
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
    with pytest.raises(FloatingPointError, match="train step 1: the gradient norm is nan"):
        step(poisoned(random_batch(1)))
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(replica), strict=True))


def test_so_many_steps_in_a_row_are_skipped_and_no_more_over_a_restart_too(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 8, "max_skipped": 3})  # two optimizer steps a batch
    step, replica = trainer(topology)
    step(poisoned(random_batch(0)))
    step(random_batch(1))
    assert replica.skipped_in_a_row == 0
    step(poisoned(random_batch(2)))
    path = save_checkpoint(replica, tmp_path, step=3, incarnation=1)
    resumed_step, resumed = trainer(topology)
    load_checkpoint(resumed, path)
    with pytest.raises(FloatingPointError, match=r"is nan, 4 in a row; train.max_skipped = 3 are allowed"):
        resumed_step(poisoned(random_batch(3)))


def test_log_ratios_beyond_what_can_be_exponentiated_leave_a_finite_gradient(make_topology: MakeTopology) -> None:
    step, _ = trainer(make_topology(algorithm={"use_rollout_logprobs": True, "num_steps_per_rollout": 1}))
    batch = random_batch()
    far = np.where(batch.loss_mask_N, -150.0, 0.0).astype(np.float32)
    trained = step(replace(batch, rollout_log_probs_N=far))
    assert not len(trained.skipped)
    assert np.isfinite(trained.metrics["train/grad_norm"])
