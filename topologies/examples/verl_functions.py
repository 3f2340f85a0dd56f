"""Functions of verl (verl/trainer/ppo/core_algos.py, 0.9.1) as functions of a user; tests compare them with verl's.

Name the losses in algorithm.custom_loss, the baseline in algorithm.rollout_data_postprocess:
"topologies/examples/verl_functions.py:clip_cov". Clip-Cov and KL-Cov (arXiv 2505.22617) spare tokens whose log-prob and
advantage vary together, to keep entropy. As in verl, covariances are over the micro-batch; log-ratios are limited.
"""

from dataclasses import replace

import numpy as np
import torch

from actors.trainer.algorithms.loss_inputs import Terms, bounded

EPS_CLIP, EPS_CLIP_HIGH = 0.2, 0.2


def clip_cov(inputs, clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0):
    """PPO, without the loss of a few random tokens whose covariance lies between two bounds."""
    log_ratio = bounded(inputs.log_probs - inputs.old_log_probs, 20.0)
    ratio = torch.exp(log_ratio)
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP_HIGH)
    found = covariances(inputs)
    chosen = torch.nonzero((found > clip_cov_lb) & (found < clip_cov_ub) & (clipped <= plain)).flatten()
    chosen = chosen[torch.randperm(len(chosen))[: max(1, int(clip_cov_ratio * len(found)))]]
    kept = torch.ones_like(ratio).index_fill(0, chosen, 0.0)
    return Terms(torch.maximum(plain, clipped) * kept, {"train/pg_clipfrac": 1 - kept, "train/ppo_kl": -log_ratio})


def kl_cov(inputs, kl_cov_ratio=2e-4, ppo_kl_coef=1.0):
    """Policy gradient, with a KL penalty on the tokens of largest covariance."""
    log_ratio = bounded(inputs.log_probs - inputs.old_log_probs, 20.0)
    found = covariances(inputs)
    count = min(len(found), max(1, int(kl_cov_ratio * len(found))))
    chosen = torch.zeros_like(found).index_fill(0, found.topk(count).indices, 1.0)
    loss = -inputs.advantages * torch.exp(log_ratio) + ppo_kl_coef * chosen * log_ratio.abs()
    return Terms(loss, {"train/kl_cov_frac": chosen, "train/ppo_kl": log_ratio.abs()})


def covariances(inputs):
    """Product of both deviations from the mean over the micro-batch, [M], without a gradient."""
    log_probs, advantages = inputs.log_probs.detach(), inputs.advantages
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def optimal_token_baseline(data, sum_pi_squared=None):
    """Reward minus a baseline per position: the group's rewards, weighted by the gradients' energy up to there.

    The energy of a token is 1 - 2 pi + sum pi^2. The trainer has no sum pi^2 over the vocabulary. The chance of the
    sampled token, whose mean is that sum, stands for it.
    """
    chance = np.exp(data.old_log_probs.astype(float))
    squares = chance if sum_pi_squared is None else sum_pi_squared
    energy = np.where(data.loss_mask, 1 - 2 * chance + squares, 0.0)
    advantages, tokens = np.zeros(len(data.tokens)), np.split(np.arange(len(data.tokens)), np.cumsum(data.lengths)[:-1])
    responses = [own[np.cumsum(data.loss_mask[own]) > 0] for own in tokens]  # from the first trained token on
    for group in np.unique(data.groups):
        samples = np.flatnonzero(data.groups == group)
        lengths = sorted(int(data.loss_mask[responses[sample]].sum()) for sample in samples)
        above, below = np.zeros((2, max(len(responses[sample]) for sample in samples)))
        for sample in samples:
            own = responses[sample]
            weight = np.cumsum(energy[own]) * data.loss_mask[own]
            above[: len(own)] += data.rewards[sample] * weight
            below[: len(own)] += weight
        baseline = above / (below + 1e-8)
        baseline[lengths[-2] if len(samples) > 1 else 0 :] = 0.0  # where one sample is left, and in a group of one
        for sample in samples:
            own = responses[sample]
            advantages[own] = (data.rewards[sample] - baseline[: len(own)]) * data.loss_mask[own]
    return replace(data, advantages=advantages)
