"""Reads FP8 matrices in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.models.fp8 import BLOCK


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrix [R, C] that a reader of 128 x 128 blocks gets: products in float32, then rounded to `dtype`."""
    rows, columns = weight.shape
    by_number = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return (weight.to(torch.float32) * by_number).to(dtype)


def transformers_reads(shape: Sequence[int]) -> bool:
    """Return whether transformers reads the blocks of a matrix correctly."""
    return all(side <= BLOCK or side % BLOCK == 0 for side in shape)
