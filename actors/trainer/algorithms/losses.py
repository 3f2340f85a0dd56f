"""Per-token losses. M is the number of trained tokens in one micro-batch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from actors.trainer.algorithms.log_ratios import bounded


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross-entropy loss of demonstration tokens.

    Args:
        log_probs: [M], of the model being trained.

    Returns:
        [M], nats.
    """
    return -log_probs


class PolicyLoss(NamedTuple):
    """Policy loss and its metrics per token, [M]."""

    loss: Tensor
    clipped: Tensor  # 1 where the clipped term is the larger one, else 0
    ppo_kl: Tensor  # old minus new log-prob, nats


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    max_log_ratio: float = math.inf,
) -> PolicyLoss:
    """PPO clipped surrogate loss, with a separate upper clip and dual clip for negative advantages.

    Args:
        log_probs: [M], of the policy being trained.
        old_log_probs: [M], of the old policy, which sampled the tokens.
        advantages: [M].
        eps_clip: Lower clip of the probability ratio: 1 - eps_clip.
        eps_clip_high: Upper clip of the probability ratio: 1 + eps_clip_high. None: eps_clip.
        eps_clip_c: Dual clip: the loss of a negative advantage is at most -eps_clip_c * advantage. None: no bound.
        max_log_ratio: Limit of log-ratios, nats.

    Source:
        PPO, arXiv 1707.06347; separate upper clip: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729.
    """
    ppo_kl = old_log_probs - log_probs
    ratio = torch.exp(bounded(-ppo_kl, max_log_ratio))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (clipped > plain).to(loss.dtype), ppo_kl)
