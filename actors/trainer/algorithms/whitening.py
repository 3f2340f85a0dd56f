"""Whitening of advantages over the trained tokens of a batch. N is the number of tokens of all samples.

Example:
    ```python
    import numpy as np

    from actors.trainer.algorithms.whitening import whiten

    found = whiten(np.array([1.0, 2.0, 3.0, 10.0]), np.array([True, True, True, False]))
    assert np.allclose(found, [-1.0, 0.0, 1.0, 8.0])
    ```
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from actors.trainer.algorithms.arguments import Floats, column, floats

VARIANCE_EPS: Final = 1e-8


def whiten(values: ArrayLike, mask: ArrayLike) -> Floats:
    """Shift and scale values to mean 0 and variance 1 over the masked tokens.

    (value - mean) / sqrt(variance + 1e-8), the variance with n - 1. It is computed in float64 and in two passes: the
    mean first, then the squared deviations from it. A large common offset therefore loses no digits.

    Args:
        values: [N], one number per token of all ranks. Values that are not finite are excluded.
        mask: [N], true where the token trains. Other tokens count in neither mean nor variance, but are transformed.

    Returns:
        [N], float64: exactly 0 where all masked values are equal.

    Edges:
        Excluded values stay as they are. With no masked token the values are returned as they are; with one the
        variance is 0, so that its value is 0. verl adds 1e-8 to its counts, which changes the ninth digit.

    Source:
        REINFORCE++, arXiv 2501.03262; epsilon and n - 1 as in slime and verl. Both compute in the dtype of the values,
        slime in one pass.
    """
    found = floats("values", values)
    counted = column("mask", mask, len(found)).astype(bool) & np.isfinite(found)
    if not counted.any():
        return found
    raised = found - found[counted].min()  # equal values then have a mean of exactly 0
    deviations = raised - raised[counted].mean()
    variance = np.square(deviations[counted]).sum() / max(int(counted.sum()) - 1, 1)
    return np.where(np.isfinite(found), deviations / np.sqrt(variance + VARIANCE_EPS), found)
