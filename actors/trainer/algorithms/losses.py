"""Losses, from the token to the optimizer step.

M is the number of trained tokens in one micro-batch, B the number of samples of one optimizer step.
"""

import math
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_KL_LIMIT: Final = 10.0  # nats


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

    With r = exp(log_probs - old_log_probs) and advantage A, the loss is

        max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)

    and for A < 0 it is at most -eps_clip_c A.

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


def kl_divergence(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator, *, max_log_ratio: float = math.inf
) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled token alone.

    With d = log_probs - ref_log_probs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, and low_var_kl = k3 clamped to
    10 nats. k1 is unbiased and may be negative. k3 is unbiased and never negative.

    Args:
        log_probs: [M], of the policy.
        ref_log_probs: [M], of the reference.
        estimator: k1, k2, k3 or low_var_kl.
        max_log_ratio: Limit in nats of the log-ratio that k3 exponentiates, as in the policy loss.

    Returns:
        [M], nats.

    Source:
        Schulman, "Approximating KL divergence", 2020. The limit of 10 nats is that of verl and slime.
    """
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    difference = bounded(difference, max_log_ratio)
    k3 = torch.exp(-difference) - 1 + difference
    return k3 if estimator == "k3" else k3.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


def bounded(log_ratios: Tensor, limit: float) -> Tensor:
    """Clamp log-ratios, [M], to +-limit. Clamped elements have no gradient.

    Without a limit the exponential overflows float32 from 88 on, and the gradient behind a clip is 0 * inf. NaN stays
    NaN, in the gradient too, so that the optimizer step is skipped instead of trained without these tokens.

    Source:
        The limit of 20 is verl's.
    """
    return torch.where(log_ratios.abs() > limit, log_ratios.clamp(-limit, limit), log_ratios)


class Reduction(NamedTuple):
    """Weights and denominator of a step's loss: sum(token weight * token loss) / sum(shares)."""

    token_weights: Floats  # [B], weight of every trained token of a sample
    shares: Ints  # [B], a sample's share of the denominator


def reduction(mask_sums: Ints, rollouts: Ints, *, per_token: bool) -> Reduction:
    """Compute how the token losses of one optimizer step are reduced to its loss.

    Per token: the mean over all trained tokens. Otherwise: the mean over rollouts of each rollout's mean over its
    tokens. A rollout without trained tokens then counts in the denominator.

    Args:
        mask_sums: [B], trained tokens of each sample.
        rollouts: [B], equal for the parts of one rollout.
        per_token: True for the mean over tokens, False for the mean over rollouts.

    Source:
        Per token: DAPO, arXiv 2503.14476. Per rollout: GRPO, arXiv 2402.03300; rollouts without tokens as in slime.
    """
    if per_token:
        return Reduction(np.ones(len(mask_sums)), mask_sums)
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    rollout_sums = np.bincount(inverse, weights=mask_sums)
    shares = np.zeros(len(rollouts), dtype=np.int64)
    shares[first] = 1
    return Reduction(1.0 / np.maximum(rollout_sums, 1.0)[inverse], shares)
