"""Advantages, losses and their reductions, as pure functions. B samples; M tokens that train, of one micro-batch."""

from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

STD_EPS: Final = 1e-6  # reward units
LOW_VAR_KL_LIMIT: Final = 10.0  # nats


def grpo_advantages(
    rewards: Floats, groups: Ints, rollouts: Ints, *, normalize: bool = True, normalize_std: bool = True
) -> Floats:
    """Centre and scale rewards within each prompt group; every token of a sample gets its sample's value.

    Args:
        rewards: [B], reward units.
        groups: [B], the prompt group of each sample, in any order.
        rollouts: [B], equal for samples that are parts of one rollout: they have one vote together, their mean.
        normalize: off: the rewards themselves.
        normalize_std: off: centred only. Off by itself for a group of one rollout, whose advantage then is 0.

    Returns:
        Advantages, [B].

    Source:
        DeepSeekMath, arXiv 2402.03300, outcome supervision. The standard deviation, left open there, divides by
        G - 1, as torch.std does by default and slime does.
    """
    if not normalize:
        return rewards.astype(np.float64)
    advantages = np.empty(len(rewards))
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, bounds):
        advantages[members] = _normalized(rewards[members], rollouts[members], normalize_std)
    return advantages


def _normalized(rewards: Floats, rollouts: Ints, normalize_std: bool) -> Floats:
    _, inverse, counts = np.unique(rollouts, return_inverse=True, return_counts=True)
    votes = np.bincount(inverse, weights=rewards) / counts
    centred = rewards - votes.mean()
    if not normalize_std or len(votes) < 2:
        return centred
    return centred / (votes.std(ddof=1) + STD_EPS)


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
) -> PolicyLoss:
    """PPO's clipped surrogate with its own upper bound, and dual clip for negative advantages.

    Args:
        log_probs: [M], of the policy in training.
        old_log_probs: [M], of the policy that sampled.
        advantages: [M].
        eps_clip: the probability ratio counts down to 1 - eps_clip.
        eps_clip_high: and up to 1 + eps_clip_high; none: eps_clip.
        eps_clip_c: where the advantage is negative the loss is at most -eps_clip_c times it; none: no bound.

    Source:
        PPO, arXiv 1707.06347; the upper bound of its own is DAPO's, arXiv 2503.14476; dual clip arXiv 1912.09729.
    """
    ppo_kl = old_log_probs - log_probs
    ratio = torch.exp(-ppo_kl)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (bounded > plain).to(loss.dtype), ppo_kl)


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled token alone.

    Args:
        log_probs: [M], of the policy.
        ref_log_probs: [M], of the reference.
        estimator: k1 is unbiased and may be negative; k2 is half its square; k3 is unbiased and never negative;
            low_var_kl is k3 limited to 10 nats.

    Returns:
        [M], nats.

    Source:
        Schulman, "Approximating KL divergence", 2020; the limit is verl's and slime's.
    """
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    k3 = torch.exp(-difference) - 1 + difference
    return k3 if estimator == "k3" else k3.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


class Reduction(NamedTuple):
    """How a step's token losses become one number: sum of weight times loss over tokens, divided by sum of shares."""

    token_weights: Floats  # [B], of every trained token of a sample
    shares: Ints  # [B], a sample's share of the denominator


def reduction(mask_sums: Ints, rollouts: Ints, *, per_token: bool) -> Reduction:
    """Weigh the samples of one optimizer step.

    Args:
        mask_sums: [B], trained tokens of each sample.
        rollouts: [B], equal for the parts of one rollout.
        per_token: mean over trained tokens; else the mean over rollouts of each rollout's mean over its tokens.
            There a rollout without any trained token counts in the denominator, as in slime.
    """
    if per_token:
        return Reduction(np.ones(len(mask_sums)), mask_sums)
    _, first, inverse = np.unique(rollouts, return_index=True, return_inverse=True)
    rollout_sums = np.bincount(inverse, weights=mask_sums)
    shares = np.zeros(len(rollouts), dtype=np.int64)
    shares[first] = 1
    return Reduction(1.0 / np.maximum(rollout_sums, 1.0)[inverse], shares)
