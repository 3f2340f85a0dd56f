"""Estimators of the KL divergence from sampled tokens. M is the number of trained tokens.

Example:
    ```python
    import math

    import torch

    from actors.trainer.algorithms.kl import kl_divergence

    policy = torch.tensor([-1.5, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    found = kl_divergence(policy, reference, "k3")
    assert torch.allclose(found, torch.tensor([math.exp(0.5) - 1.5, 0.0], dtype=torch.float64))
    assert kl_divergence(policy, reference, "k1").tolist() == [-0.5, 0.0]
    ```
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from actors.trainer.algorithms.arguments import check_name, check_shape
from actors.trainer.algorithms.loss_inputs import MAX_LOG_RATIO, bounded

KlEstimator = str  # one of FORMS

LOW_VAR_KL_LIMIT: Final = 10.0  # nats


def _k1(d: Tensor, max_log_ratio: float) -> Tensor:
    del max_log_ratio
    return d


def _k2(d: Tensor, max_log_ratio: float) -> Tensor:
    del max_log_ratio
    return d.square() / 2


def _k3(d: Tensor, max_log_ratio: float) -> Tensor:
    d = bounded(d, max_log_ratio)
    return torch.exp(-d) - 1 + d


def _k1_plus(d: Tensor, max_log_ratio: float) -> Tensor:
    return _straight_through(d, _k2(d, max_log_ratio))


def _k3_plus(d: Tensor, max_log_ratio: float) -> Tensor:
    return _straight_through(_k3(d, max_log_ratio).clamp(max=LOW_VAR_KL_LIMIT), _k2(d, max_log_ratio))


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """Return a value with the gradient of another one."""
    return value.detach() + (gradient - gradient.detach())


FORMS: Final[Mapping[str, Callable[[Tensor, float], Tensor]]] = {  # by the type of algorithm.kl, of d and max_log_ratio
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _k3,  # limited below, after the factor
    "k1+": _k1_plus,
    "k3+": _k3_plus,
}
EXPONENTIAL: Final = ("k3", "low_var_kl", "k3+")  # limit d


def kl_divergence(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: KlEstimator = "k1",
    *,
    old_log_probs: Tensor | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Tensor:
    """Estimate KL(policy || reference) per token from the sampled token alone.

    d is log_probs - ref_log_probs. k1 and k3 are unbiased, and k3 is never negative. verl calls low_var_kl k3. The
    gradient of k1+ and k3+ is an unbiased gradient of the divergence.

    With old log-probs the estimate is multiplied by exp(log_probs - old_log_probs), with its gradient: then estimate
    and gradient are unbiased for tokens that the old policy sampled.

    Args:
        log_probs: [M], of the policy.
        ref_log_probs: [M], of the reference.
        estimator: k1, k2, k3, low_var_kl, k1+ or k3+.
        old_log_probs: [M], of the old policy. None: no factor.
        max_log_ratio: Limit in nats of the log-ratios that are exponentiated, as in the policy loss.

    Returns:
        [M], nats.

    Edges:
        k3, low_var_kl and k3+ limit d to +-max_log_ratio before the exponential, and beyond it k3 and low_var_kl have
        no gradient. low_var_kl is limited to +-10 after the factor, the value of k3+ before it. k1, k2, k1+ and the
        gradient of k3+ are not limited. Equal log-probs give 0. slime does not limit d.

    Raises:
        ValueError: The estimator is unknown, or the shapes differ.

    Source:
        Schulman, "Approximating KL divergence", 2020. The limit of 10 nats is that of verl and slime. The factor:
        DeepSeek-V3.2, arXiv 2512.02556, as in slime. k1+ and k3+: verl. NeMo-RL's k3 is low_var_kl with
        old_log_probs = log_probs.detach().
    """
    check_name("estimator", estimator, FORMS)
    check_shape("ref_log_probs", ref_log_probs, log_probs)
    if old_log_probs is not None:
        check_shape("old_log_probs", old_log_probs, log_probs)
    found = FORMS[estimator](log_probs - ref_log_probs, max_log_ratio)
    if old_log_probs is not None:
        found = torch.exp(bounded(log_probs - old_log_probs, max_log_ratio)) * found
    return found.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if estimator == "low_var_kl" else found


def kl_clamped(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator, *, max_log_ratio: float = MAX_LOG_RATIO
) -> Tensor:
    """Mark tokens whose estimate of the divergence is limited.

    1 where |log_probs - ref_log_probs| > max_log_ratio, or low_var_kl or k3+ without a factor is above 10 nats.

    Args:
        log_probs: [M], of the policy.
        ref_log_probs: [M], of the reference.
        estimator: k1, k2 and k1+ have no limit.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        [M], without a gradient, 0 or 1.

    Edges:
        A log-ratio equal to the limit is not limited. NaN gives 0.

    Raises:
        ValueError: The estimator is unknown.

    Source:
        The limits are those of `kl_divergence`.
    """
    check_name("estimator", estimator, FORMS)
    difference = (log_probs - ref_log_probs).detach()
    if estimator not in EXPONENTIAL:
        return torch.zeros_like(difference)
    limited = difference.abs() > max_log_ratio
    if estimator != "k3":
        limited |= _k3(difference, max_log_ratio) > LOW_VAR_KL_LIMIT
    return limited.to(difference.dtype)
