"""Tensors of the trainer fused from those of the files, and split into them again.

The blocks list both (`runtime/models/blocks.py`). A matrix is [out, in] in both. Layers are numbered over the whole
model, and experts over all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import copies_of, weights_of


def joined_for_megatron(name: str, model: HfConfig, source: Callable[[str], Tensor], *, parts: int = 1) -> Tensor:
    """Build a tensor of the trainer from those of the files.

    Args:
        name: of the trainer's tensor.
        model: configuration of the model.
        source: tensors by Hugging Face name: full, or the equal shards of a tensor-parallel rank; of a stack of
            experts all, or this one.
        parts: number of shards of the rows.
    """
    weight = weights_of(model)[name]
    projections = [source(part) for part in weight.parts]
    if weight.is_transposed and weight.place is not None:
        return _of_stack(projections[0], *weight.place, is_alternating=weight.is_alternating)
    if len(projections) == 1:
        return projections[0]
    groups = max(weight.groups // parts, 1)
    return torch.cat([projection.unflatten(0, (groups, -1)) for projection in projections], dim=1).flatten(0, 1)


def split_for_hf(name: str, model: HfConfig, whole: Tensor, *, parts: int = 1) -> list[tuple[str, Tensor]]:
    """Split a tensor of the trainer into those of the files, by name: the inverse of `joined_for_megatron`.

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


def _of_stack(stored: Tensor, number: int, count: int, *, is_alternating: bool) -> Tensor:
    """Return an expert's tensor of a stack [experts, in, out] or [experts, out], or of this expert alone."""
    own = stored[number if len(stored) == count else 0]
    rows = own.t() if own.dim() == 2 else own
    return torch.cat([rows[::2], rows[1::2]]) if is_alternating else rows


def _for_stack(rows: Tensor, *, is_alternating: bool) -> Tensor:
    """Lay out an expert's tensor as a stack has it: the inverse of `_of_stack`."""
    if is_alternating:
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1)
    return rows.t().contiguous() if rows.dim() == 2 else rows
