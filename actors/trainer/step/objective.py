"""The loss that a recipe trains with: the terms per token, their weights, and their metrics."""

from collections.abc import Callable
from functools import partial

import torch

from actors.trainer.algorithms.kl import kl_divergence
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences, Terms
from actors.trainer.algorithms.policy_losses import ppo_loss, sft_loss
from runtime.settings.recipe import AlgorithmConfig

PolicyLoss = Callable[[LossInputs], Terms]


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss that the settings name."""
    return partial(
        ppo_loss,
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
        max_log_ratio=algorithm.max_log_ratio,
    )


class Objective:
    """Adds the terms of the loss. A pure function of its inputs, chosen once."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Choose the terms."""
        self._algorithm = algorithm
        self._demonstrations = algorithm.loss_type == "sft_loss"
        self._policy_loss = policy_loss(algorithm)
        self.names: tuple[str, ...] = tuple(self(_no_tokens(), entropy_coef=0.0).metrics)

    def __call__(self, inputs: LossInputs, *, entropy_coef: float) -> Terms:
        """Compute the loss of each token, and the metrics: the loss first, all without gradients.

        Args:
            inputs: Columns of one micro-batch.
            entropy_coef: Weight of the entropy bonus. 0 computes no gradient of the entropy.
        """
        if self._demonstrations:
            loss = sft_loss(inputs.log_probs)
            return _reported(loss, Terms(loss, {"train/sft_loss": loss, "train/entropy_loss": inputs.entropy}))
        algorithm, policy = self._algorithm, self._policy_loss(inputs)
        total = policy.loss - entropy_coef * inputs.entropy if entropy_coef else policy.loss
        metrics = {"train/pg_loss": policy.loss, "train/entropy_loss": inputs.entropy, **policy.metrics}
        if algorithm.kl_loss_coef:
            assert inputs.ref_log_probs is not None
            divergence = kl_divergence(
                inputs.log_probs,
                inputs.ref_log_probs,
                algorithm.kl_loss_type,
                max_log_ratio=algorithm.max_log_ratio,
            )
            total = total + algorithm.kl_loss_coef * divergence
            metrics["train/kl_loss"] = divergence
        return _reported(total, Terms(policy.loss, metrics))


def _reported(total: torch.Tensor, terms: Terms) -> Terms:
    """Put the whole loss first, and detach all metrics."""
    metrics = {"train/loss": total, **terms.metrics}
    return Terms(total, {name: values.detach() for name, values in metrics.items()})


def _no_tokens() -> LossInputs:
    """Inputs without tokens: what a loss makes of them has the names of its metrics."""
    none = torch.empty(0)
    return LossInputs(
        log_probs=none,
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=none,
        advantages=none,
        entropy=none,
        sequences=Sequences(torch.empty(0, dtype=torch.int64), count=1),
    )
