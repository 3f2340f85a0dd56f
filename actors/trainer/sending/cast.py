"""Buckets of weights in the form in which engines keep them: bfloat16, or FP8 in blocks, as Hugging Face stores it.

FP8 here is that of DeepSeek-V3's and Qwen3-FP8's checkpoints. A matrix `X.weight` [R, C] is cut into blocks of
128 x 128; the last block of a side may be smaller. It is stored as float8_e4m3fn, and beside it `X.weight_scale_inv`,
float32 [ceil(R / 128), ceil(C / 128)], has what each block is multiplied with to read it. Quantized are the matrices
of layers, those of experts too. Embeddings, lm_head, norms, biases and routers stay bfloat16, a router's
`e_score_correction_bias` float32.

Who reads which shapes (SGLang 0.5.23 `layers/quantization/fp8.py`, transformers 5.23 `Fp8Dequantize`):

- SGLang on one rank reads blocks of 128 whatever the sides, but for projections that it joins (query, key and value;
  gate and up; those of experts): the rows of each, and an expert's inner size, must be multiples of 128. Over more
  ranks this holds for a rank's part, of rows and of columns.
- transformers takes no notice of the 128: it divides each side evenly by the scales. That is the same where a side is
  at most 128 or a multiple of it. Of others it refuses those that do not divide evenly (576 by 5), and reads the rest
  WRONG without a word (192 by 2: 96 and 96, not 128 and 64). `transformers_reads` says which it reads.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from actors.trainer.models.gathering import Bucket
from actors.trainer.models.shards import Entry, entry_of

BLOCK: Final = 128
_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = torch.finfo(_FP8).max  # 448
_LARGEST: Final = torch.finfo(torch.bfloat16).max  # more would be infinite for who reads it as bfloat16
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny  # below, a scale is rounded coarsely, at last to zero
_IN_LAYER: Final = re.compile(r"(?:.+\.)?layers\.\d+\.(?P<module>.+)\.weight")
_NOT_QUANTIZED: Final = {  # of a layer, by the last part of the name: routers; what is there for further tokens
    "gate",
    "router",
    "shared_expert_gate",
    "embed_tokens",
    "eh_proj",
    "head",
}
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
            cast.append(_entry(scale_name(entry.name), _grid(entry.shape), torch.float32))
        else:
            cast += entries_in_bfloat16([entry])
    return cast


def quantization_config(entries: Iterable[Entry]) -> dict[str, Any]:
    """What config.json says under `quantization_config`, for readers to know an FP8 checkpoint.

    Args:
        entries: all tensors of the model, before or after the cast.
    """
    kept = {
        entry.name.removesuffix(".weight")
        for entry in entries
        if entry.name.endswith(".weight") and len(entry.shape) == 2 and not is_quantized(entry.name, entry.shape)
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept | {"lm_head"}),  # which a reader builds even where its weight is tied
    }


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is one of those that an FP8 checkpoint has in blocks."""
    match = _IN_LAYER.fullmatch(name)
    return match is not None and len(shape) == 2 and match["module"].rpartition(".")[2] not in _NOT_QUANTIZED


def scale_name(name: str) -> str:
    """Under which name the scales of a matrix are."""
    return f"{name}_scale_inv"


def transformers_reads(shape: Sequence[int]) -> bool:
    """Whether transformers divides a matrix into the blocks that it has."""
    return all(side <= BLOCK or side % BLOCK == 0 for side in shape)


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


def _grid(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-side // BLOCK) for side in shape)


def _in_blocks(matrix: Tensor) -> Tensor:
    """Float32 [R, C] as [blocks of rows, 128, blocks of columns, 128], filled up with zeros."""
    down, across = _grid(matrix.shape)
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
