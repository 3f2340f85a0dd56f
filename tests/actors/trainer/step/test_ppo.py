"""PPO with a critic: whole train steps against an independent loop, and what the critic and the actor see."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.critic import Critic
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import state_of, whole_weights, write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.step.reference_critic import ReferenceCritic, head_of
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")


def trainer(topology: Topology) -> tuple[TrainStep, Replica, Critic]:
    replica, critic = Replica(topology, CPU), Critic(topology, CPU)
    return TrainStep(topology, replica, critic), replica, critic


class ReferencePpo(ReferenceTrainer):
    """Advantages per token from the values of a critic, which learns the returns."""

    def __init__(self, topology: Topology, model: Any, critic: ReferenceCritic, **models: Any) -> None:
        super().__init__(topology, model, **models)
        self._critic = critic

    def train(self, batch: TrainBatch) -> list[dict[str, float]]:
        """Train the critic on the batch, then the policy; return the metrics of each optimizer step of the policy."""
        self._batch = batch
        return super().train(batch)

    def _set_advantages(self, samples: list[dict[str, Any]]) -> None:
        batch, algorithm = self._batch, self._topology.algorithm
        with torch.no_grad():
            values = [self._critic.values(batch, index).numpy() for index in range(len(samples))]
        value_N, return_N = np.zeros(len(batch.tokens_N)), np.zeros(len(batch.tokens_N))
        for index, sample in enumerate(samples):
            begin = int(batch.starts_B[index]) + 1  # the first token has no value
            sampled = np.flatnonzero(sample["mask"].numpy())
            first = int(sampled[0]) if len(sampled) else len(values[index])
            own = values[index].astype(np.float64)
            advantages, returns = np.zeros(len(own)), np.zeros(len(own))
            by_length, gamma = algorithm.estimator.lambd, algorithm.estimator.gamma
            of_returns = (
                algorithm.estimator.lambd
                if algorithm.estimator.critic_lambd is None
                else algorithm.estimator.critic_lambd
            )
            penalties = algorithm.kl.reward_coef * self._divergence(sample)
            if algorithm.estimator.length_adaptive_alpha:
                by_length = 1 - 1 / max(algorithm.estimator.length_adaptive_alpha * (len(own) - first), 1)
            for wanted, lambd in ((advantages, by_length), (returns, of_returns)):
                error, following = 0.0, 0.0
                for place in reversed(range(first, len(own))):
                    reward = (sample["reward"] if place == len(own) - 1 else 0.0) - float(penalties[place])
                    error = reward + gamma * following - own[place] + gamma * lambd * error
                    following = own[place]
                    wanted[place] = error
            returns[first:] += own[first:]
            sample["advantage"] = torch.from_numpy(advantages).float()
            value_N[begin : begin + len(own)], return_N[begin : begin + len(own)] = own, returns
        if algorithm.normalize_advantages:
            self._whiten(samples)
        self.critic_losses = self._critic.train_steps(batch, value_N, return_N)

    def _whiten(self, samples: list[dict[str, Any]]) -> None:
        tokens = torch.cat([sample["advantage"][sample["mask"] > 0] for sample in samples]).double()
        for sample in samples:
            sample["advantage"] = (sample["advantage"] - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
            sample["advantage"] = sample["advantage"].float()


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"estimator": {"type": "ppo", "critic_lambd": 1.0}},
    "own lambda, whitened, two steps": {
        "normalize_advantages": True,
        "num_steps_per_rollout": 2,
        "entropy_coef": 0.05,
        "estimator": {
            "type": "ppo",
            "critic_lambd": 0.7,
            "length_adaptive_alpha": 0.4,
            "value_clip": 0.05,
            "value_loss_coef": 0.5,
        },
    },
    "discounted, the divergence in the rewards of both": {
        "num_steps_per_rollout": 2,
        "estimator": {"type": "ppo", "gamma": 0.9, "lambd": 0.8},
        "kl": {"type": "k1", "reward_coef": 0.5},
    },
    "per token, with a divergence": {
        "estimator": {"type": "ppo", "critic_lambd": 1.0},
        "reduction": {"type": "token-mean"},
        "kl": {"type": "k3", "loss_coef": 0.1},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_whole_steps_equal_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, name: str, packed: bool
) -> None:
    model, body, reference = (write_model(tmp_path / "weights") for _ in range(3))
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "weights"), "random_init": False},
        algorithm={"num_steps_per_rollout": 1, "kl": {"type": "k3"}} | SETTINGS[name],
        critic={"lr": 3e-3, "init_method_std": 0.3, "weight_decay": 0.05},
        trainer={"packed": packed},
    )
    step, replica, critic = trainer(topology)
    expected = ReferencePpo(
        topology, model, ReferenceCritic(body, head_of(critic), topology), reference_model=reference
    )
    for number in range(3):
        batch = random_batch(number)
        metrics, losses = step(batch).metrics, expected.train(batch)
        for key in losses[0]:
            mean = sum(one[key] for one in losses) / len(losses)
            assert metrics[f"train/{key}"] == pytest.approx(mean, abs=1e-4), key
        mean = sum(expected.critic_losses) / len(expected.critic_losses)
        assert metrics["train/value_loss"] == pytest.approx(mean, abs=1e-4)
    state = state_of(model)
    for key, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[key], rtol=0, atol=2e-4)
    torch.testing.assert_close(head_of(critic), expected._critic.weight.detach(), rtol=0, atol=2e-4)


def test_a_critic_learns_to_explain_the_returns(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"estimator": {"type": "ppo"}}, critic={"lr": 1e-2})
    step, *_ = trainer(topology)
    batch = random_batch(0)
    found = [step(replace(batch, step=number)).metrics["train/explained_variance"] for number in range(12)]
    assert found[0] < 0.1
    assert found[-1] > 0.3


def test_a_reward_that_is_not_finite_masks_its_sample_for_both(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"num_steps_per_rollout": 1, "estimator": {"type": "ppo"}})
    step, *_ = trainer(topology)
    batch = random_batch()
    rewards_B = batch.rewards_B.copy()
    rewards_B[3] = math.nan
    trained = step(replace(batch, rewards_B=rewards_B))
    assert trained.masked.tolist() == [3]
    for name in ("train/loss", "train/value_loss", "train/explained_variance", "rollout/returns"):
        assert math.isfinite(trained.metrics[name]), name
