"""Buckets of weights in the form in which engines keep them: bfloat16, or FP8 in blocks, as Hugging Face stores it.

What is in blocks, and who reads them: runtime/weights/fp8.py.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from actors.trainer.models.gathering import Bucket
from actors.trainer.models.handover import AS_TRAINED, Form
from actors.trainer.models.shards import Entry, entry_of
from runtime.settings.topology import WeightFormat
from runtime.weights.fp8 import BLOCK, grid_of, is_quantized, scale_name

_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = torch.finfo(_FP8).max  # 448
_LARGEST: Final = torch.finfo(torch.bfloat16).max  # more would be infinite for who reads it as bfloat16
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny  # below, a scale is rounded coarsely, at last to zero
_STAYS_FLOAT32: Final = "e_score_correction_bias"  # chooses experts: what is rounded here chooses others


def to_bfloat16(bucket: Bucket) -> Bucket:
    """A bucket in bfloat16.

    Raises:
        ValueError: a tensor has a number that bfloat16 has not; says which.
    """
    return [(name, _bfloat16(name, tensor)) for name, tensor in bucket]


def to_fp8(bucket: Bucket) -> Bucket:
    """A bucket as an FP8 checkpoint has it: a quantized matrix is followed by its scales.

    Raises:
        ValueError: a tensor has a number that bfloat16 has not; says which.
    """
    cast: Bucket = []
    for name, tensor in bucket:
        if is_quantized(name, tensor.shape):
            weight, scales = quantized(name, tensor)
            cast += [(name, weight), (scale_name(name), scales)]
        else:
            cast.append((name, _bfloat16(name, tensor)))
    return cast


def entries_in_bfloat16(entries: Iterable[Entry]) -> list[Entry]:
    """What `to_bfloat16` makes of tensors, without the tensors."""
    return [_entry(entry.name, entry.shape, _bfloat16_dtype(entry.name)) for entry in entries]


def entries_in_fp8(entries: Iterable[Entry]) -> list[Entry]:
    """What `to_fp8` makes of tensors, without the tensors."""
    cast: list[Entry] = []
    for entry in entries:
        if is_quantized(entry.name, entry.shape):
            cast.append(_entry(entry.name, entry.shape, _FP8))
            cast.append(_entry(scale_name(entry.name), grid_of(entry.shape), torch.float32))
        else:
            cast += entries_in_bfloat16([entry])
    return cast


def quantized(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and what each of its blocks is multiplied with to read it.

    Args:
        name: for the message.
        matrix: [R, C], of any floating dtype.

    Returns:
        float8_e4m3fn [R, C], and float32 [ceil(R / 128), ceil(C / 128)]. A block's largest number becomes 448, the
        largest of FP8. A block of zeros has the scale one. A block whose largest is below 448 times the smallest
        normal float32 gets that one as its scale: so small, numbers lose bits or become zero.

    Raises:
        ValueError: there is a number that is infinite, none, or larger than bfloat16 has.

    Source:
        DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), whose kernel divides by largest / 448 and leaves open what
        a block of zeros has; one, as transformers writes it.
    """
    blocks = _in_blocks(matrix.detach().to(torch.float32))
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    if not bool((largest <= _LARGEST).all()):
        raise ValueError(_refused(name, matrix, torch.bfloat16))
    scales = torch.where(largest > 0, (largest / _FP8_MAX).clamp(min=_SMALLEST_SCALE), 1.0)
    # A scale that was rounded down makes the largest a bit more than 448: up to 464 it is rounded to that, not to NaN.
    cast = (blocks / scales[:, None, :, None]).to(_FP8)
    return _out_of_blocks(cast, matrix.shape), scales


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrix that a reader of 128 x 128 blocks gets: products in float32, then rounded to `dtype`."""
    blocks = _in_blocks(weight.to(torch.float32)) * scales[:, None, :, None]
    return _out_of_blocks(blocks.to(dtype), weight.shape)


def _in_blocks(matrix: Tensor) -> Tensor:
    """Float32 [R, C] as [blocks of rows, 128, blocks of columns, 128], filled up with zeros."""
    down, across = grid_of(matrix.shape)
    rows, columns = matrix.shape
    missing = (0, across * BLOCK - columns, 0, down * BLOCK - rows)
    filled = torch.nn.functional.pad(matrix, missing) if any(missing) else matrix
    return filled.reshape(down, BLOCK, across, BLOCK)


def _out_of_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    rows, columns = shape
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()


def _bfloat16_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(_STAYS_FLOAT32) else torch.bfloat16


def _bfloat16(name: str, tensor: Tensor) -> Tensor:
    dtype = _bfloat16_dtype(name)
    low, high = tensor.detach().aminmax()  # no number if there is one that is none
    if not bool((low >= -torch.finfo(dtype).max) & (high <= torch.finfo(dtype).max)):
        raise ValueError(_refused(name, tensor, dtype))
    return tensor.detach().to(dtype)


def _refused(name: str, tensor: Tensor, dtype: torch.dtype) -> str:
    largest = torch.finfo(dtype).max
    wrong = (~(tensor.detach().abs() <= largest)).nonzero()
    first = tuple(wrong[0].tolist())
    return (
        f"{name} {list(tensor.shape)}: {len(wrong)} of its numbers are not finite or beyond {largest:.4g}, the largest "
        f"of {str(dtype).removeprefix('torch.')}; the first is {tensor[first].item()} at {list(first)}"
    )


def _entry(name: str, shape: Sequence[int], dtype: torch.dtype) -> Entry:
    return entry_of(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))


FORMS: Final[dict[WeightFormat, Form]] = {
    "as_trained": AS_TRAINED,
    "bfloat16": Form(to_bfloat16, entries_in_bfloat16),
    "fp8": Form(to_fp8, entries_in_fp8),
}
