"""Inputs of a loss, for tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences

Column = Tensor | Sequence[float]


def inputs(
    new: Column,
    old: Column | None = None,
    advantages: Column | None = None,
    *,
    rollout: Column | None = None,
    ref: Column | None = None,
    entropy: Column | None = None,
    rewards: Column | None = None,
    trainer: Column | None = None,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Columns of as many tokens as `new` has; the others are 0 by default, the engine's log-probs are the old ones.

    Args:
        new: Log-probs of the policy being trained. A tensor is used as it is, with its gradient.
        old: Old log-probs.
        advantages: Advantages.
        rollout: The engine's log-probs.
        ref: The reference model's log-probs.
        entropy: Entropies.
        rewards: Rewards of the tokens' samples.
        trainer: The trainer's log-probs before the first optimizer step, by default the old ones.
        lengths: Trained tokens of each sequence. By default one sequence has all tokens.
        dtype: Type of columns that are given as numbers.
    """
    log_probs = _column(new, dtype)
    nothing = torch.zeros_like(log_probs, requires_grad=False)
    lengths = [len(log_probs)] if lengths is None else lengths
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def column(given: Column | None, default: Tensor) -> Tensor:
        return default if given is None else _column(given, log_probs.dtype)

    olds = column(old, nothing)
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=olds,
        rollout_log_probs=column(rollout, olds),
        ref_log_probs=column(ref, nothing),
        advantages=column(advantages, nothing),
        entropy=column(entropy, nothing),
        rewards=column(rewards, nothing),
        trainer_log_probs=column(trainer, olds),
        sequences=Sequences(numbers, len(lengths)),
    )


def _column(given: Column, dtype: torch.dtype) -> Tensor:
    return given if isinstance(given, Tensor) else torch.tensor(given, dtype=dtype)
