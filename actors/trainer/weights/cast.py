"""Conversion of buckets to the engines' dtype: bfloat16, or FP8 in blocks as in Hugging Face's checkpoints.

runtime/models/fp8.py defines which tensors are quantized, and which programs read the format.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from actors.trainer.models.shards import Entry, entry_of
from actors.trainer.weights.export import AS_TRAINED, WeightConversion
from actors.trainer.weights.gathering import Bucket
from runtime.models.fp8 import BLOCK, grid_of, is_quantized, scale_name
from runtime.settings.tables.engines import WeightFormat

_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = torch.finfo(_FP8).max  # 448
_LARGEST: Final = torch.finfo(torch.bfloat16).max  # larger values would become infinite in bfloat16
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny  # smaller scales lose precision, and finally become zero
_STAYS_FLOAT32: Final = "e_score_correction_bias"  # selects experts: rounded values would select others


def to_bfloat16(bucket: Bucket) -> Bucket:
    """Convert a bucket to bfloat16.

    Raises:
        ValueError: bfloat16 cannot represent a value. The message names it.
    """
    return [(name, _bfloat16(name, tensor)) for name, tensor in bucket]


def to_fp8(bucket: Bucket) -> Bucket:
    """Convert a bucket to the format of an FP8 checkpoint: each quantized matrix is followed by its scales.

    Raises:
        ValueError: bfloat16 cannot represent a value. The message names it.
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
    """Describe the result of `to_bfloat16`, without the tensors."""
    return [_entry(entry.name, entry.shape, _bfloat16_dtype(entry.name)) for entry in entries]


def entries_in_fp8(entries: Iterable[Entry]) -> list[Entry]:
    """Describe the result of `to_fp8`, without the tensors."""
    cast: list[Entry] = []
    for entry in entries:
        if is_quantized(entry.name, entry.shape):
            cast.append(_entry(entry.name, entry.shape, _FP8))
            cast.append(_entry(scale_name(entry.name), grid_of(entry.shape), torch.float32))
        else:
            cast += entries_in_bfloat16([entry])
    return cast


def quantized(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to FP8 in blocks.

    Args:
        name: name of the matrix, for the error message.
        matrix: [R, C], of any floating-point dtype.

    Returns:
        float8_e4m3fn [R, C], and the scales of the blocks, float32 [ceil(R / 128), ceil(C / 128)]. A reader multiplies
        each block by its scale. The largest magnitude of a block becomes 448, the maximum of FP8. A block of zeros has
        the scale one. The smallest scale is the smallest normal float32. In a block that needs a smaller one, values
        lose bits or become zero.

    Raises:
        ValueError: a value is NaN, infinite, or above the maximum of bfloat16.

    Source:
        arXiv 2412.19437, section 3.3.2. Its kernel divides by largest / 448 and leaves open the scale of
        a block of zeros. Here it is one, as in transformers.
    """
    blocks = _in_blocks(matrix.detach().to(torch.float32))
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    if not bool((largest <= _LARGEST).all()):
        raise ValueError(_refused(name, matrix, torch.bfloat16))
    scales = torch.where(largest > 0, (largest / _FP8_MAX).clamp(min=_SMALLEST_SCALE), 1.0)
    # A scale that was rounded down puts the largest value slightly above 448. Up to 464 it becomes 448, not NaN.
    cast = (blocks / scales[:, None, :, None]).to(_FP8)
    return _out_of_blocks(cast, matrix.shape), scales


def _in_blocks(matrix: Tensor) -> Tensor:
    """Reshape float32 [R, C] to [blocks of rows, 128, blocks of columns, 128], padded with zeros."""
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
    low, high = tensor.detach().aminmax()  # NaN if the tensor has a NaN
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


FORMS: Final[dict[WeightFormat, WeightConversion]] = {
    "as_trained": AS_TRAINED,
    "bfloat16": WeightConversion(to_bfloat16, entries_in_bfloat16),
    "fp8": WeightConversion(to_fp8, entries_in_fp8),
}
