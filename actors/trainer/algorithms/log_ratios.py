"""Differences of log-probs that are to be exponentiated. M tokens that train, of one micro-batch."""

import torch
from torch import Tensor


def bounded(log_ratios: Tensor, limit: float) -> Tensor:
    """Cut log-ratios, [M], at a limit; beyond it they have no gradient.

    Without a bound the exponential is infinite from 88 on, and the gradient of what a clip cuts off is 0 * inf. What
    is no number stays none, in its gradient too: such a step is to be left out, not trained without these tokens.

    Source:
        The bound of 20 is verl's.
    """
    return torch.where(log_ratios.abs() > limit, log_ratios.clamp(-limit, limit), log_ratios)
