"""Bounded log-ratios. M is the number of trained tokens in one micro-batch."""

import torch
from torch import Tensor


def bounded(log_ratios: Tensor, limit: float) -> Tensor:
    """Clamp log-ratios, [M], to +-limit. Clamped elements have no gradient.

    Without a limit the exponential overflows float32 from 88 on, and the gradient behind a clip is 0 * inf. NaN stays
    NaN, in the gradient too, so that the optimizer step is skipped instead of trained without these tokens.

    Source:
        The limit of 20 is verl's.
    """
    return torch.where(log_ratios.abs() > limit, log_ratios.clamp(-limit, limit), log_ratios)
