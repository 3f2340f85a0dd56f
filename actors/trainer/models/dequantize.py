"""Numbers of quantized checkpoints: any region of a tensor, from the parts of its stored tensors that have it.

`runtime/models/quantization.py` says how they are stored. Numbers are computed a strip of rows at a time, so no second
copy of a region is in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from runtime.models.fp8 import BLOCK
from runtime.models.quantization import GROUP, PER_BYTE, PER_WORD, Quantization

STRIP: Final = 1 << 19  # numbers that are computed at once
BITS: Final = 4
HALF: Final = 1 << (BITS - 1)  # added to integers of 4 bits, so that none is negative
EXPONENT_OF_ONE: Final = 127
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4: Final = (*_POSITIVE, *(-number for number in _POSITIVE))  # E2M1, by its four bits

Parts = Mapping[str, Any]  # safetensors' slices of the stored tensors, by the ending of their names


def dequantized(quantization: Quantization, parts: Parts, region: Sequence[range], dtype: torch.dtype) -> Tensor:
    """Compute a region of a quantized tensor.

    Args:
        quantization: how it is stored.
        parts: its stored tensors.
        region: indices along each of its dimensions.
        dtype: of the result. As in transformers, numbers are rounded once, and integers first to their scale's dtype.
    """
    found = torch.empty([len(indices) for indices in region], dtype=dtype)
    compute, rows, target = _FORMS[quantization.method], [*region], found
    if quantization.method == "mxfp4":  # stored [out, in]
        rows, target = [*region[:-2], region[-1], region[-2]], found.transpose(-1, -2)
    for numbers, own, strip in _strips(rows):
        target[(*numbers, slice(own.start, own.stop))].copy_(compute(parts, strip))
    return found


def _strips(region: Sequence[range]) -> Iterator[tuple[tuple[int, ...], range, list[range]]]:
    """Cut a region into strips of rows; yield the place of each in the region, and its region of the whole tensor."""
    *before, rows, columns = region
    step = max(1, STRIP // max(1, len(columns)))
    for numbers in product(*(range(len(indices)) for indices in before)):
        stacked = [indices[number : number + 1] for indices, number in zip(before, numbers, strict=True)]
        for first in range(0, len(rows), step):
            own = range(first, min(first + step, len(rows)))
            yield numbers, own, [*stacked, rows[first : own.stop], columns]


def _fp8(parts: Parts, region: Sequence[range]) -> Tensor:
    """Compute a strip of a matrix that is stored in blocks with a factor each."""
    *before, rows, columns = region
    stored = _read(parts[""], before, rows, columns).float()
    scales = _read(parts["_scale_inv"], before, _groups(rows, BLOCK), _groups(columns, BLOCK)).float()
    return stored.mul_(scales[_places(rows, BLOCK)][:, _places(columns, BLOCK)])


def _mxfp4(parts: Parts, region: Sequence[range]) -> Tensor:
    """Compute a strip [out, in] of a stack of floats of 4 bits, with an exponent for each group."""
    *before, rows, columns = region
    groups = _groups(columns, GROUP)
    first = columns.start - groups.start * GROUP
    packed = _read(parts["_blocks"], before, rows, groups, range(GROUP // PER_BYTE))
    scales = _read(parts["_scales"], before, rows, groups)
    exponents = (scales.int() - EXPONENT_OF_ONE).repeat_interleave(GROUP, dim=1)
    numbers = torch.stack([packed & (1 << BITS) - 1, packed >> BITS], dim=-1).flatten(1).int()
    found = torch.ldexp(torch.tensor(FP4)[numbers], exponents)
    return found[:, first : first + len(columns)]


def _int4(parts: Parts, region: Sequence[range]) -> Tensor:
    """Compute a strip of a matrix of integers of 4 bits, with a factor for each group of a row."""
    rows, columns = region
    words = _groups(columns, PER_WORD)
    first = columns.start - words.start * PER_WORD
    packed = _read(parts["_packed"], (), rows, words)
    shifts = torch.arange(0, BITS * PER_WORD, BITS, dtype=torch.int32)
    numbers = ((packed.unsqueeze(-1) >> shifts) & (1 << BITS) - 1).flatten(1)[:, first : first + len(columns)]
    scales = _read(parts["_scale"], (), rows, _groups(columns, GROUP))
    return (numbers - HALF).to(scales.dtype) * scales[:, _places(columns, GROUP)]


_FORMS: Final = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _int4}


def _groups(indices: range, size: int) -> range:
    """Return the groups of a size that indices touch."""
    return range(indices.start // size, -(-indices.stop // size))


def _places(indices: range, size: int) -> Tensor:
    """Return the group of each index, counted from the first one that they touch."""
    return torch.arange(indices.start, indices.stop) // size - indices.start // size


def _read(stored: Any, before: Sequence[range], *inner: range) -> Tensor:
    """Read a region of a stored tensor, or of one tensor in a stack, whose dimensions are left out."""
    found = stored[tuple(slice(indices.start, indices.stop) for indices in (*before, *inner))]
    return found.reshape([len(indices) for indices in inner])
