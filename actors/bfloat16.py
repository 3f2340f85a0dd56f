"""Products of bfloat16 matrices on a processor without instructions for them: in float32, rounded once.

There torch multiplies them value by value: a core with AVX2 does 0.6 to 8 GFLOP/s, and 30 to 60 in float32.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runtime.models.dtypes import bfloat16_feature


@cache
def multiply_in_float32() -> bool:
    """Replace torch's products of matrices on the CPU, for the whole process, if the processor is slow in bfloat16.

    Sums are in float32 and results are rounded once, as on processors with the instructions. Products of other dtypes
    stay as they are.

    Returns:
        Whether they are replaced.
    """
    if bfloat16_feature() is not None:
        return False
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # a replaced kernel is meant
        for name, product in {"mm": _mm, "bmm": _bmm, "addmm": _addmm, "baddbmm": _baddbmm}.items():
            _LIBRARY.impl(name, product, "CPU")  # pyright: ignore[reportUnknownMemberType]
    return True


_LIBRARY = torch.library.Library("aten", "IMPL")
_Product = Callable[..., Any]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(torch.mm, (a.shape[0], b.shape[1]), a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _product(torch.bmm, (a.shape[0], a.shape[1], b.shape[2]), a, b)


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _product(torch.addmm, (a.shape[0], b.shape[1]), added, a, b, beta=beta, alpha=alpha)


def _baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _product(torch.baddbmm, (a.shape[0], a.shape[1], b.shape[2]), added, a, b, beta=beta, alpha=alpha)


def _product(multiply: _Product, shape: tuple[int, ...], *operands: Tensor, **factors: float) -> Tensor:
    """Multiply into a new tensor: the kernels that take one are torch's own, so this does not call itself."""
    dtype = operands[0].dtype
    if all(operand.dtype is torch.bfloat16 for operand in operands):  # torch refuses different ones
        operands = tuple(operand.float() for operand in operands)
    out = operands[0].new_empty(shape)
    multiply(*operands, out=out, **factors)
    return out.to(dtype)
