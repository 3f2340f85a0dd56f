"""Tensors of the trainer fused from those of the files, and split into them again.

The blocks list both (`runtime/models/blocks.py`). A matrix is [out, in] in both. Layers are numbered over the whole
model, and experts over all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import copies_of, weights_of


@torch.no_grad()
def read_into(target: Tensor, name: str, model: HfConfig, source: Callable[[str], Tensor], *, parts: int = 1) -> None:
    """Set a tensor of the trainer to those of the files that it is fused of, each read and copied before the next.

    Args:
        target: the trainer's tensor, or the part of it that a tensor-parallel rank holds.
        name: of the trainer's tensor.
        model: configuration of the model.
        source: tensors by Hugging Face name: full, or the equal shards of a tensor-parallel rank; of a stack of
            experts all, or this one.
        parts: number of shards of the rows.

    Raises:
        ValueError: a tensor has another shape than the model.
    """
    weight = weights_of(model)[name]
    if weight.is_transposed and weight.place is not None:
        (only,) = weight.parts
        rows = _of_stack(source(only), *weight.place)
        stored = [rows[::2], rows[1::2]] if weight.is_alternating else [rows]
        for own, half in zip(target.chunk(len(stored)), stored, strict=True):
            _copy(own, half, name)
        return
    if len(weight.parts) == 1:
        (only,) = weight.parts
        _copy(target, source(only), name)
        return
    groups = max(weight.groups // parts, 1)
    sizes = [shape[0] // parts // groups for shape in weight.parts.values()]
    if len(target) != sum(sizes) * groups:
        raise ValueError(f"{name}: the weights have {sum(sizes) * groups} rows, the model {len(target)}")
    for own, part in zip(target.unflatten(0, (groups, -1)).split(sizes, dim=1), weight.parts, strict=True):
        _copy(own, source(part).unflatten(0, (groups, -1)), name)


def _copy(own: Tensor, part: Tensor, name: str) -> None:
    if part.shape != own.shape:
        raise ValueError(f"{name}: the weights have shape {tuple(part.shape)}, the model {tuple(own.shape)}")
    own.copy_(part)


def split_for_hf(name: str, model: HfConfig, whole: Tensor, *, parts: int = 1) -> list[tuple[str, Tensor]]:
    """Split a tensor of the trainer into those of the files, by name: the inverse of `read_into`.

    What belongs into a stack of experts has its number behind the name: `NAME[3]`.

    Args:
        name: of the trainer's tensor.
        model: configuration of the model.
        whole: the full tensor, or the equal shard of a tensor-parallel rank, which yields shards of each part.
        parts: number of shards of the rows.
    """
    weight = weights_of(model)[name]
    ending = "" if weight.place is None else f"[{weight.place[0]}]"
    if weight.is_transposed:
        (only,) = weight.parts
        return [(f"{only}{ending}", _for_stack(whole, is_alternating=weight.is_alternating))]
    if len(weight.parts) == 1:
        (only,) = weight.parts
        return [(f"{hf_name}{ending}", whole) for hf_name in (only, *copies_of(only, model))]
    groups = max(weight.groups // parts, 1)
    rows = [shape[0] // parts // groups for shape in weight.parts.values()]
    split = [own.flatten(0, 1) for own in whole.unflatten(0, (groups, sum(rows))).split(rows, dim=1)]
    if weight.is_stored_joined and parts == 1:
        return [(f"{weight.joined}{ending}", torch.cat(split))]
    return [*zip(weight.parts, split, strict=True)]


def _of_stack(stored: Tensor, number: int, count: int) -> Tensor:
    """Return an expert's tensor of a stack [experts, in, out] or [experts, out], or of this expert alone."""
    own = stored[number if len(stored) == count else 0]
    return own.t() if own.dim() == 2 else own


def _for_stack(rows: Tensor, *, is_alternating: bool) -> Tensor:
    """Lay out an expert's tensor as a stack has it: the inverse of `read_into`."""
    if is_alternating:
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1)
    return rows.t().contiguous() if rows.dim() == 2 else rows
