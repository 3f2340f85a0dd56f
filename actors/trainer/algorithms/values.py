"""The critic's loss, and how much of the returns its values explain. M tokens, N tokens of the batch.

Example:
    ```python
    import torch

    from actors.trainer.algorithms.values import value_loss

    values = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    loss, metrics = value_loss(values, old, returns, value_clip=0.25)
    assert loss.tolist() == [0.0625, 0.25]  # (0.75 - 1)^2 is above (1 - 1)^2
    assert metrics["train/value_clipfrac"].tolist() == [1.0, 0.0]
    ```
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, maximum

from actors.trainer.algorithms.arguments import check_shape, column, floats
from actors.trainer.algorithms.loss_inputs import Terms

VARIANCE_EPS: Final = 1e-5


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None = 0.2, value_loss_coef: float = 1.0
) -> Terms:
    """Clipped squared error of values and returns, per token.

    c max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2), with e = value_clip and c = value_loss_coef.

    Args:
        values: [M], V, of the critic being trained, with its gradient; float32 or float64.
        old_values: [M], V_old, before the first optimizer step of the batch.
        returns: [M], R, in reward units.
        value_clip: Largest change of a value that lowers the loss, in reward units. None: no limit.
        value_loss_coef: Factor of the loss; 1 as in slime, 0.5 as in verl.

    Returns:
        The loss, [M], and `train/value_loss` with its value, and `train/value_clipfrac`: 1 where |V - V_old| > e.

    Edges:
        Beyond the clip a token has no gradient if its clipped error is the larger one. NaN in any input gives NaN.

    Raises:
        ValueError: The shapes differ.

    Source:
        PPO's value clipping in OpenAI's baselines; the metrics are slime's. verl's vf_clipfrac counts tokens whose
        clipped error is the larger one.
    """
    check_shape("old_values", old_values, values)
    check_shape("returns", returns, values)
    loss = (values - returns).square()
    clipped = values.new_zeros(values.shape)
    if value_clip is not None:
        change = values - old_values
        loss = maximum(loss, (old_values + change.clamp(-value_clip, value_clip) - returns).square())
        clipped = (change.abs() > value_clip).to(values.dtype)
    loss = value_loss_coef * loss
    return Terms(loss, {"train/value_loss": loss.detach(), "train/value_clipfrac": clipped.detach()})


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> float:
    """Share of the returns' variance that the values explain: 1 - Var(R - V) / (Var(R) + 1e-5), in float64.

    Args:
        values: [N], V, in reward units.
        returns: [N], R.
        mask: [N], true where the token trains.

    Returns:
        At most 1.

    Edges:
        About 0 for a constant V, negative if V is worse. 1 where R - V is constant. Variances divide by n - 1. With
        fewer than two finite tokens it is 0.

    Source:
        The metric vf_explained_var of verl, whose epsilon it has.
    """
    predicted = floats("values", values)
    found = floats("returns", returns, len(predicted))
    counted = column("mask", mask, len(predicted)).astype(bool) & np.isfinite(predicted) & np.isfinite(found)
    if counted.sum() < 2:
        return 0.0
    found = found[counted]
    errors = found - predicted[counted]
    return float(1.0 - errors.var(ddof=1) / (found.var(ddof=1) + VARIANCE_EPS))
