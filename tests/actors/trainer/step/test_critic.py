"""The critic: its value head, and its steps against an independent loop."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.shapes import VALUE_BIAS, VALUE_HEAD
from actors.trainer.step.critic import Critic, Estimates
from actors.trainer.step.estimator import advantage_inputs
from actors.trainer.step.train_step import TrainStep
from runtime.settings.tables.estimators import Grpo
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.step.reference_critic import ReferenceCritic, head_of
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
PPO = {"estimator": {"type": "ppo"}}


def steps_of(topology: Topology, batch: TrainBatch) -> tuple[Any, torch.Tensor]:
    """Optimizer steps of a batch, and the weights of its tokens."""
    algorithm = msgspec.structs.replace(topology.algorithm, estimator=Grpo())  # a policy's step, without a critic
    plain = msgspec.structs.replace(topology, algorithm=algorithm)
    steps = TrainStep(plain, Replica(plain, CPU))._planner.steps(batch)
    weights = batch.spread(np.concatenate([step.reduction.token_weights for step in steps]))
    return steps, torch.from_numpy(weights)


@pytest.mark.parametrize(("tied", "packed"), [(False, False), (True, True)])
def test_a_critic_starts_from_a_policy_and_learns_as_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, tied: bool, packed: bool
) -> None:
    model = write_model(tmp_path / "weights", tied=tied)
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "weights"), "random_init": False},
        algorithm={
            "num_steps_per_rollout": 1,
            "estimator": {"type": "ppo", "value_clip": 0.05, "value_loss_coef": 0.5},
        },
        critic={"lr": 3e-3, "init_method_std": 0.3},
        trainer={"packed": packed},
    )
    critic = Critic(topology, CPU)
    reference = ReferenceCritic(model, head_of(critic), topology)
    for number in range(3):
        batch = random_batch(number)
        wanted_N = advantage_inputs(batch).response_mask
        values_N = critic.values(batch, wanted_N)
        expected_N = np.zeros_like(values_N)
        with torch.no_grad():
            for sample, (begin, length) in enumerate(zip(batch.starts_B, batch.lengths_B, strict=True)):
                expected_N[begin + 1 : begin + length] = reference.values(batch, sample).numpy()
        np.testing.assert_allclose(values_N, np.where(wanted_N, expected_N, 0.0), rtol=0, atol=2e-5)
        estimates = Estimates(values_N, np.random.default_rng(number).normal(0, 1, len(values_N)))
        steps, weights_N = steps_of(topology, batch)
        losses = reference.train_steps(batch, estimates.values_N, estimates.returns_N)
        done, metrics = critic.train(batch, steps, estimates, weights_N)
        assert metrics["train/value_loss"] == pytest.approx(losses[0], rel=1e-4)
        assert [one.is_taken for one in done] == [True]
    torch.testing.assert_close(head_of(critic), reference.weight.detach(), rtol=0, atol=2e-4)


def test_a_new_value_head_is_normal_and_one_in_the_files_is_kept(make_topology: MakeTopology, tmp_path: Path) -> None:
    write_model(tmp_path / "weights", tied=False)
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "weights"), "random_init": False},
        critic={"init_method_std": 0.5},
        algorithm=PPO,
    )
    new = head_of(Critic(topology, CPU))
    assert new.std().item() == pytest.approx(0.5, rel=0.6)
    assert torch.equal(new, head_of(Critic(topology, CPU)))
    stored = load_file(tmp_path / "weights" / "model.safetensors")
    stored[VALUE_HEAD], stored[VALUE_BIAS] = torch.full_like(new, 0.25), torch.tensor([0.5])
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "weights" / "model.safetensors", metadata={"format": "pt"})
    other = make_topology(
        model={"random_init": True},
        critic={"hf_checkpoint": str(tmp_path / "weights"), "init_method_std": 0.5},
        algorithm=PPO,
    )
    critic = Critic(other, CPU)
    assert torch.equal(head_of(critic), torch.full_like(new, 0.25))
    assert critic.replica.complete_chunks()[0].output_layer.bias.item() == 0.5


def test_a_sample_with_a_return_that_is_not_finite_is_masked(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"num_steps_per_rollout": 1, **PPO})
    critic, batch = Critic(topology, CPU), random_batch()
    values_N, returns_N = critic.values(batch, batch.loss_mask_N != 0), np.ones(len(batch.tokens_N))
    returns_N[batch.tokens_of(np.array([2]))] = math.nan
    steps, weights_N = steps_of(topology, batch)
    (done,), metrics = critic.train(batch, steps, Estimates(values_N, returns_N), weights_N)
    assert done.is_taken
    assert np.flatnonzero(done.masked_B).tolist() == ([2] if batch.mask_sums_B[2] else [])
    assert math.isfinite(metrics["train/value_loss"])
