"""Coefficients as functions of progress alone, so that a resumed run continues them exactly."""

import math

from runtime.settings.recipe import AlgorithmConfig, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, *, num_steps: int) -> float:
    """Linear warm-up, then constant, linear or cosine decay to min_lr.

    Args:
        config: the recipe's optimizer table.
        step: optimizer steps done before this one. The first step of a warm-up over w steps already has lr / w.
        num_steps: optimizer steps that are planned, over which the rate decays unless lr_decay_iters is set.
    """
    warmup = config.lr_warmup_iters
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    decay = max((config.lr_decay_iters or num_steps) - warmup, 1)
    progress = min((step - warmup) / decay, 1.0)
    remaining = 1.0 - progress if config.lr_decay_style == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining


def entropy_coef(config: AlgorithmConfig, step: int, *, num_steps: int) -> float:
    """The entropy bonus of a train step: linear from entropy_coef at the first to entropy_coef_end at the last one.

    Args:
        config: the recipe's algorithm table.
        step: number of the train step, from 0.
        num_steps: train steps that are planned.
    """
    if config.entropy_coef_end is None:
        return config.entropy_coef
    progress = min(step / max(num_steps - 1, 1), 1.0)
    return config.entropy_coef + (config.entropy_coef_end - config.entropy_coef) * progress
