"""The critic: values of a batch's tokens, and its optimizer steps on their returns.

On the actor's ranks the train step calls it. On ranks of its own, critic_rank.py does, by order of the actor's rank 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import Flags
from actors.trainer.algorithms.loss_inputs import Terms
from actors.trainer.algorithms.values import explained_variance, value_loss
from actors.trainer.data.batch import Floats32, MicroBatch, TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.checkpoint import begin_critic_from
from actors.trainer.megatron.megatron_lm import begin_from_megatron_lm
from actors.trainer.megatron.rank_model import Replica, TokenValues
from actors.trainer.step.layout import laid_out, shared
from actors.trainer.step.learner import Done, Learner, OptimizerStep, StepLoss
from actors.trainer.step.metrics import StepTimer
from runtime.settings.placement import max_sample_tokens
from runtime.settings.tables.estimators import Gae
from runtime.settings.topology import Topology, critic_topology

METRICS: Final = ("train/value_loss", "train/value_clipfrac")


class Estimates(NamedTuple):
    """Values before training, and their returns, [N] each. Every rank has them whole."""

    values_N: Floats32
    returns_N: NDArray[np.floating[Any]]


class Critic:
    """Estimates values, and learns from returns."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Build the critic's model with its initial weights and a value head.

        Raises:
            ValueError, OSError: Its model directory cannot be used; the text says why.
        """
        own = critic_topology(topology)
        self._weights_only = topology.trainer.load_weights_only
        self._has_own_weights = topology.critic.hf_checkpoint is not None
        self.replica = Replica(own, device, value_head_std=topology.critic.init_method_std)
        self.learner = Learner(own, self.replica, METRICS, prefix="critic ")
        self._max_tokens = max_sample_tokens(own)
        named = topology.algorithm.estimator
        assert isinstance(named, Gae)
        self._loss = partial(value_loss, value_clip=named.value_clip, value_loss_coef=named.value_loss_coef)

    def begin_from(self, path: Path, *, of_megatron_lm: bool) -> None:
        """Start from the checkpoint of another run, or from the policy in it. A collective of all ranks.

        Raises:
            ValueError: An earlier version of the trainer saved the checkpoint.
            Whatever Megatron raises when files are damaged or belong to another model.
        """
        if not of_megatron_lm:
            own_weights = self._has_own_weights
            begin_critic_from(self.replica, path, weights_only=self._weights_only, own_weights=own_weights)
        elif not self._has_own_weights:
            begin_from_megatron_lm(self.replica, path, weights_only=True, with_head=False)

    def values(self, batch: TrainBatch, wanted_N: Flags) -> Floats32:
        """Compute the values of some tokens, [N], 0 elsewhere. A collective of all ranks.

        Args:
            batch: The whole batch.
            wanted_N: Tokens to compute values of: also those that do not train, such as a tool's output.
        """
        whole = replace(batch, loss_mask_N=wanted_N.astype(np.uint8))
        samples = np.arange(len(batch.lengths_B))
        shares = shared(self.replica, batch, samples, max_tokens=self._max_tokens)
        own_N = np.zeros(len(batch.tokens_N), dtype=np.float32)
        self.replica.fill_values(laid_out(self.replica, whole, shares), own_N)
        return ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()

    def train(
        self, batch: TrainBatch, steps: Sequence[OptimizerStep], estimates: Estimates, weights_N: Tensor
    ) -> tuple[list[Done], dict[str, float]]:
        """Take the optimizer steps of a batch on the critic. A collective of all ranks.

        Args:
            batch: The whole batch.
            steps: Those of the actor: their micro-batches and reductions are the critic's, too.
            estimates: Values and returns.
            weights_N: Weight of each token's loss.

        Returns:
            The optimizer steps, and metrics, complete on rank 0 and on the last pipeline stage.
        """
        own = [replace(step, micro_batches=list(map(_without_experts, step.micro_batches))) for step in steps]
        done = self.learner.train(batch, own, self._loss_of(estimates), weights_N.clone(), StepTimer())
        return done, self._metrics(batch, done, estimates)

    def _loss_of(self, estimates: Estimates) -> StepLoss:
        device = self.replica.device
        values_N = torch.tensor(estimates.values_N, device=device)
        returns_N = torch.tensor(estimates.returns_N.astype(np.float32), device=device)

        def loss(_step: OptimizerStep, _micro_batch: MicroBatch, outputs: TokenValues) -> Terms:
            where_M = outputs.columns_M
            return self._loss(outputs.values, values_N[where_M], returns_N[where_M])

        return loss

    def _metrics(self, batch: TrainBatch, done: Sequence[Done], estimates: Estimates) -> dict[str, float]:
        taken, mask = [one for one in done if one.is_taken], batch.loss_mask_N != 0
        return self.learner.metrics(done) | {
            "train/explained_variance": explained_variance(estimates.values_N, estimates.returns_N, mask),
            "rollout/values": _mean(estimates.values_N[mask]),
            "rollout/returns": _mean(estimates.returns_N[mask]),
            "train/critic-grad_norm": float(np.mean([one.norm for one in taken or done])),
            "train/critic-lr-pg_0": self.learner.learning_rate(batch.step, done[-1].step.number),
            "train/critic-num_skipped_steps": float(len(done) - len(taken)),
        }


def _without_experts(micro_batch: MicroBatch) -> MicroBatch:
    """Leave out the experts and MTP inputs of the actor."""
    return replace(micro_batch, experts={}, routed_experts=None, mtp=None)


def _mean(values: NDArray[np.floating[Any]]) -> float:
    """Average the finite values: samples without a usable reward have none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0
