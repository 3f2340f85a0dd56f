"""Estimators of the KL divergence from sampled tokens. M is the number of trained tokens."""

import math
from typing import Final, Literal

import torch
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import bounded

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_KL_LIMIT: Final = 10.0  # nats


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
