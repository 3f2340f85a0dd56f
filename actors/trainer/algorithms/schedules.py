"""Schedules of coefficients. They depend on progress alone, so that a resumed run continues them exactly.

Example:
    ```python
    from actors.trainer.algorithms.schedules import learning_rate
    from runtime.settings.tables.training import OptimizerConfig

    config = OptimizerConfig(lr=1.0, lr_warmup_iters=4, lr_decay_style="linear", lr_decay_iters=14)
    rates = [learning_rate(config, step, num_steps=20) for step in (0, 3, 4, 9, 14, 19)]
    assert rates == [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    ```
"""

import math

from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, *, num_steps: int) -> float:
    """Learning rate: linear warm-up, then constant, or linear or cosine decay to min_lr.

    With warm-up w, decay over n steps and x = (step - w) / (n - w): lr (step + 1) / w, then
    min_lr + (lr - min_lr) (1 - x), or min_lr + (lr - min_lr) (1 + cos(pi x)) / 2.

    Args:
        config: The recipe's optimizer table.
        step: Optimizer steps completed before this one. The first step of a warm-up over w steps already has lr / w.
        num_steps: Planned optimizer steps. The rate decays over them unless lr_decay_iters is set.

    Returns:
        The learning rate of the step, a float.

    Edges:
        After the decay the rate stays min_lr. A decay that ends within the warm-up takes one step.

    Source:
        Megatron-LM's OptimizerParamScheduler; the cosine: SGDR, arXiv 1608.03983.
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
    """Entropy coefficient: linear from entropy_coef at the first train step to entropy_coef_end at the last one.

    entropy_coef + (entropy_coef_end - entropy_coef) min(step / (num_steps - 1), 1).

    Args:
        config: The recipe's algorithm table.
        step: Number of the train step, from 0.
        num_steps: Planned train steps.

    Returns:
        The coefficient of the step, a float.

    Edges:
        Without entropy_coef_end it is constant. After the last planned step it stays. A single step has entropy_coef.

    Source:
        Plain linear interpolation.
    """
    if config.entropy_coef_end is None:
        return config.entropy_coef
    progress = min(step / (num_steps - 1), 1.0) if num_steps > 1 else 0.0
    return config.entropy_coef + (config.entropy_coef_end - config.entropy_coef) * progress
