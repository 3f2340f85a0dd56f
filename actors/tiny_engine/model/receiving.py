"""Receive buffers for weight updates, and writing named tensors into the fused weights."""

from collections.abc import Iterable, Sequence
from typing import Final

import structlog
import torch
from torch import Tensor

from actors.tiny_engine.model.forward import Weights, layer_of

FUSED: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
log: structlog.stdlib.BoundLogger = structlog.get_logger()

Named = Sequence[tuple[str, Tensor]]


def rooms(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Allocate the tensors of a bucket, one by one.

    Raises:
        ValueError: a dtype does not exist, or a shape is negative.
    """
    checked = [_checked(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    return [torch.empty(shape, dtype=dtype) for dtype, shape in checked]


def flat_room(
    dtypes: Sequence[str], shapes: Sequence[Sequence[int]], held: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Allocate the tensors of a bucket as consecutive views of one byte tensor.

    Args:
        dtypes: dtypes of the tensors.
        shapes: shapes of the tensors.
        held: uint8 memory to reuse if it is large enough.

    Returns:
        The byte tensor, and the views.

    Raises:
        ValueError: a dtype or shape is invalid, the bucket is empty, or a tensor is not aligned to its dtype.
    """
    checked = [_checked(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    if not checked:
        raise ValueError("Cannot create empty tensor bucket")
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in checked]
    flat = torch.empty(sum(sizes), dtype=torch.uint8) if held is None or len(held) < sum(sizes) else held[: sum(sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    views = [
        view(flat, start, size, dtype, shape)
        for start, size, (dtype, shape) in zip(starts, sizes, checked, strict=True)
    ]
    return flat, views


def view(flat: Tensor, start: int, size: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View a range of bytes as a tensor.

    Raises:
        ValueError: the bytes do not fit dtype and shape, or are not aligned.
    """
    if start % dtype.itemsize:
        raise ValueError(f"Unaligned received tensor: byte offset {start}, dtype {dtype}")
    try:
        return flat[start : start + size].view(dtype).reshape(list(shape))
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _checked(dtype: str, shape: Sequence[int]) -> tuple[torch.dtype, list[int]]:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        raise ValueError(f"dtype {dtype!r}: torch has no such dtype")
    if any(size < 0 for size in shape):
        raise ValueError(f"Negative dimension in received tensor: {list(shape)}")
    return known, list(shape)


def write(weights: Weights, named: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite weights tensor by tensor, in the engine's dtype. Tensors before a refused one stay written.

    Names that the model does not have are skipped with a warning, as in SGLang.

    Raises:
        ValueError: a shape differs from the model's, or the tensor belongs to a fused one that the model lacks.
    """
    try:
        for name, tensor in named:
            room = _room(weights, name)
            if room is None:
                continue
            if room.shape != tensor.shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, the model has {list(room.shape)}")
            room.copy_(tensor)
    finally:
        weights.settle()


def _room(weights: Weights, name: str) -> Tensor | None:
    """The destination of a tensor; None if it is skipped."""
    if weights.config.tie_word_embeddings and name == weights.config.name_of("lm_head.weight"):
        return None  # the embedding arrives under its own name
    room = weights.named.get(name)
    if room is None:
        if (
            layer_of(name) < weights.config.num_layers
            and any(part in name for part in FUSED)
            and not name.endswith(".bias")
        ):
            raise ValueError(f"{name}: this {weights.config.architecture} has no such tensor")
        log.warning("tensor_unknown", name=name)
    return room
