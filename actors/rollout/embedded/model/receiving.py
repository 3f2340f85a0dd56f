"""Weights that come tensor by tensor under Hugging Face's names, into the fused tensors that are held."""

from collections.abc import Iterable, Sequence
from typing import Final

import structlog
import torch
from torch import Tensor

from actors.rollout.embedded.model.forward import Weights

FUSED: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
log: structlog.stdlib.BoundLogger = structlog.get_logger()

Named = Sequence[tuple[str, Tensor]]


def rooms(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Memory for the tensors of a bucket, one each.

    Raises:
        ValueError: a dtype or a shape does not exist.
    """
    checked = [_checked(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    return [torch.empty(shape, dtype=dtype) for dtype, shape in checked]


def flat_room(
    dtypes: Sequence[str], shapes: Sequence[Sequence[int]], held: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Memory for the tensors of a bucket in one piece of bytes, and the tensors as views of it, one behind the other.

    Args:
        dtypes: of the tensors.
        shapes: likewise.
        held: memory to use, if it is large enough; uint8.

    Raises:
        ValueError: there is no such dtype or shape, or no tensor, or one begins where its dtype cannot.
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
    """The tensor that lies in some of the bytes.

    Raises:
        ValueError: the bytes are no such tensor.
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
        raise ValueError(f"dtype {dtype!r}: torch has none of that name")
    if any(size < 0 for size in shape):
        raise ValueError(f"Negative dimension in received tensor: {list(shape)}")
    return known, list(shape)


def write(weights: Weights, named: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite what is held, tensor by tensor, in the dtype that is held; those before a refused one are written.

    A name that the model has not is left out, as SGLang does: there is a warning in its log and in ours.

    Raises:
        ValueError: a tensor has not the shape that the model has, or is a part of a fused one that the model has not.
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
    """Where a tensor is held; None: nowhere, and nobody minds."""
    if name == "lm_head.weight" and weights.config.tie_word_embeddings:
        return None  # the embedding comes by its own name
    room = weights.named.get(name)
    if room is None:
        if (
            _layer(name) < weights.config.num_layers
            and any(part in name for part in FUSED)
            and not name.endswith(".bias")
        ):
            raise ValueError(f"{name}: this {weights.config.architecture} has no such part")
        log.warning("tensor_unknown", name=name)
    return room


def _layer(name: str) -> int:
    """Index of the layer that a name is of; -1: of none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal() else -1
