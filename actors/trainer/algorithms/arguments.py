"""Checks of arguments that the functions of this package share. A wrong name or shape is never guessed."""

from collections.abc import Collection
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Refuse a value that a Literal does not have.

    Raises:
        ValueError: It names the argument, the value and what is allowed.
    """
    check_name(name, value, get_args(allowed))


def check_name(name: str, value: object, allowed: Collection[object]) -> None:
    """Refuse a value that is not one of several.

    Raises:
        ValueError: It names the argument, the value and what is allowed.
    """
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def check_shape(name: str, values: Any, like: Any) -> None:
    """Refuse a tensor of another shape, which would be broadcast.

    Raises:
        ValueError: It names the argument, its shape and that of `like`.
    """
    if tuple(values.shape) != tuple(like.shape):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(like.shape)}")


def array(values: Any) -> NDArray[Any]:
    """Return a sequence, numpy array or torch tensor as an array. A tensor leaves its gradient and device behind."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    return np.asarray(values)


def column(name: str, values: Any, size: int | None = None) -> NDArray[Any]:
    """Return a sequence, numpy array or torch tensor as a one-dimensional array of its dtype.

    Args:
        name: Of the argument, for the error.
        values: A tensor may have a gradient and any device, which are left behind.
        size: Number of elements. None: any.

    Raises:
        ValueError: It has another shape.
    """
    found = array(values)
    if found.ndim != 1 or (size is not None and len(found) != size):
        raise ValueError(f"{name} has shape {found.shape}, expected {'one dimension' if size is None else (size,)}")
    return found


def floats(name: str, values: Any, size: int | None = None) -> Floats:
    """Return a column in float64. Shapes and errors are those of `column`."""
    return column(name, values, size).astype(np.float64)


def group_numbers(name: str, ids: Any, size: int) -> NDArray[np.int64]:
    """Number the groups that equal ids form, in the order of the ids: integers or texts.

    Args:
        name: Of the argument, for the error.
        ids: One per sample, in any order.
        size: Number of samples.

    Raises:
        ValueError: There is not one id per sample.
    """
    return np.unique(column(name, ids, size), return_inverse=True)[1]
