"""Losses per token. M tokens that train, of one micro-batch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from actors.trainer.algorithms.log_ratios import bounded


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross entropy of each token of a demonstration.

    Args:
        log_probs: [M], of the model in training.

    Returns:
        [M], nats.
    """
    return -log_probs


class PolicyLoss(NamedTuple):
    """Per token, [M]."""

    loss: Tensor
    clipped: Tensor  # 1 where the clip decides, else 0
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
    """PPO's clipped surrogate with its own upper bound, and dual clip for negative advantages.

    Args:
        log_probs: [M], of the policy in training.
        old_log_probs: [M], of the policy that sampled.
        advantages: [M].
        eps_clip: the probability ratio counts down to 1 - eps_clip.
        eps_clip_high: and up to 1 + eps_clip_high; none: eps_clip.
        eps_clip_c: where the advantage is negative the loss is at most -eps_clip_c times it; none: no bound.
        max_log_ratio: nats, at which log-ratios are cut.

    Source:
        PPO, arXiv 1707.06347; the upper bound of its own is DAPO's, arXiv 2503.14476; dual clip arXiv 1912.09729.
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
