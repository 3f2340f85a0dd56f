"""Policy losses and the loss of demonstrations, per token. M is the number of trained tokens of one micro-batch."""

import math

import torch
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import LossInputs, Terms, bounded


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross-entropy loss of demonstration tokens: -log p.

    Args:
        log_probs: [M], of the model being trained.

    Returns:
        [M], nats.

    Source:
        Negative log-likelihood, as torch.nn.functional.cross_entropy has it per token.
    """
    return -log_probs


def ppo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    max_log_ratio: float = math.inf,
) -> Terms:
    """PPO clipped surrogate loss, with a separate upper clip and dual clip for negative advantages.

    With r = exp(log_probs - old_log_probs) and advantage A, the loss is

        max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)

    and for A < 0 it is at most -eps_clip_c A.

    Args:
        inputs: Uses log_probs, old_log_probs and advantages.
        eps_clip: Lower clip of the probability ratio: 1 - eps_clip.
        eps_clip_high: Upper clip of the probability ratio: 1 + eps_clip_high. None: eps_clip.
        eps_clip_c: Dual clip: the loss of a negative advantage is at most -eps_clip_c * advantage. None: no bound.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        Metrics: pg_clipfrac, 1 where the clipped term is the larger one; ppo_kl, old minus new log-prob in nats.

    Source:
        PPO, arXiv 1707.06347; separate upper clip: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    return _clipped(ppo_kl, inputs.advantages, eps_clip, eps_clip_high, eps_clip_c, max_log_ratio)


def _clipped(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
    max_log_ratio: float,
) -> Terms:
    """Clipped surrogate loss of the ratio exp(-ppo_kl)."""
    ratio = torch.exp(bounded(-ppo_kl, max_log_ratio))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return Terms(loss, {"train/pg_clipfrac": (clipped > plain).to(loss.dtype), "train/ppo_kl": ppo_kl})
