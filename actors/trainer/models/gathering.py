"""The whole model under Hugging Face's names, tensor by tensor, from the ranks of a pipeline stage to one of them.

What takes the weights elsewhere, to files or to engines, goes through `buckets`. All ranks of a stage go through it
together. The first rank of the stage, which is of the first data-parallel replica, gets the tensors; the others give
their parts, or skip those in which they have none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.cuts import cut_of, global_name, is_of_expert, names_of, tensors_of
from actors.trainer.models.names import split_for_hf
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import Entry, entry_of

Bucket = list[tuple[str, Tensor]]  # whole tensors by Hugging Face name, on this rank's device


class Part(NamedTuple):
    """A tensor of this rank's model, which may be a part of one, and who has the others."""

    names: tuple[str, ...]  # Megatron's, of what the ranks of the group have here; all have the same but for experts
    tensor: Tensor
    dim: int  # along which parts are joined
    num_parts: int  # of each name; the group's ranks are in the order of names, then parts
    group: Any  # of ranks


def own_parts(chunks: Sequence[Any], model: HfConfig) -> list[Part]:
    """What this rank has of the model, in the order in which it is exported. Tensors are the model's own.

    Args:
        chunks: the rank's GPTModels.
        model: what they were built from.
    """
    return [
        _part(global_name(name, built), tensor, model)
        for built in chunks
        for name, tensor in tensors_of(built)
        if not _is_copy(name, built, model)
    ]


def _is_copy(name: str, built: Any, model: HfConfig) -> bool:
    """Whether a tensor of the last pipeline stage is the first one's: what it shares, or a further layer reads."""
    if name == "output_layer.weight":
        return model.tie_word_embeddings
    return name.startswith("embedding.") and not built.pre_process


def _part(name: str, tensor: Any, model: HfConfig) -> Part:
    """Expert-parallel ranks have other experts under one name."""
    cut = cut_of(name, tensor)
    dim, count = (0, 1) if cut is None else (cut.dim, cut.count)
    ranks = range(parallel_state.get_expert_model_parallel_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    if is_of_expert(name):
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return Part(names_of(name, model, *ranks), tensor.data, dim, count, group)


def first_rank() -> int:
    """The rank of this pipeline stage that gets whole tensors."""
    return dist.get_process_group_ranks(stage_group())[0]


def stage_group() -> Any:
    """All ranks of this pipeline stage."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def whole_entries(parts: Iterable[Part], model: HfConfig) -> list[Entry]:
    """All that `whole_tensors` yields, without asking other ranks."""
    shapes = hf_shapes(model)
    return [entry for part in parts for entry in _entries(part, model, shapes)]


def _entries(part: Part, model: HfConfig, shapes: Mapping[str, Sequence[int]]) -> list[Entry]:
    """What becomes of a part, and of those of other ranks, under Hugging Face's names."""
    shape = list(part.tensor.shape)
    shape[part.dim] *= part.num_parts
    whole = torch.empty(shape, dtype=part.tensor.dtype, device="meta")
    return [
        entry_of(hf_name, _without_padding(tensor, shapes.get(hf_name)))
        for name in part.names
        for hf_name, tensor in split_for_hf(name, model, whole)
    ]


def whole_tensors(
    parts: Iterable[Part], model: HfConfig, device: torch.device
) -> Iterator[tuple[Entry, Tensor | None]]:
    """Every tensor of this stage, on its first rank; on the others nothing in their place. A collective of the stage.

    Args:
        parts: of this rank, or copies of them.
        model: the whole one.
        device: of this rank; parts may be elsewhere.
    """
    first, shapes = first_rank(), hf_shapes(model)
    for part in parts:
        yield from _wholes(part, _entries(part, model, shapes), model, first, device)


def _wholes(
    part: Part, entries: Sequence[Entry], model: HfConfig, first: int, device: torch.device
) -> Iterator[tuple[Entry, Tensor | None]]:
    """Of one part; when it ends nothing of it is held here."""
    pieces = _collected(part, first, device)
    if pieces is None:
        yield from ((entry, None) for entry in entries)
        return
    expected = iter(entries)
    for index, name in enumerate(part.names):
        own = pieces[index * part.num_parts : (index + 1) * part.num_parts]
        for tensor in _joined(name, part, own, model):
            entry = next(expected)
            yield entry, _without_padding(tensor, entry.shape)


def _joined(name: str, part: Part, own: Tensor, model: HfConfig) -> Iterator[Tensor]:
    """The whole tensors of one name, from its parts one behind the other."""
    split = [split_for_hf(name, model, piece, parts=part.num_parts) for piece in own]
    if part.dim == 0 and len(split[0]) == 1:
        yield own.flatten(0, 1)
        return
    for same in zip(*split, strict=True):
        yield same[0][1] if part.num_parts == 1 else torch.cat([piece for _, piece in same], dim=part.dim)


def _collected(part: Part, first: int, device: torch.device) -> Tensor | None:
    """The parts of all ranks of the group, one behind the other, on the stage's first rank; nothing on the others."""
    if part.num_parts == len(part.names) == 1:  # others have copies of it
        return part.tensor.to(device)[None] if dist.get_rank() == first else None
    ranks = dist.get_process_group_ranks(part.group)
    if ranks[0] != first:  # another replica's
        return None
    own = part.tensor.to(device).contiguous()
    collected = own.new_empty(len(ranks), *own.shape) if dist.get_rank() == first else None
    dist.gather(own, None if collected is None else list(collected), dst=first, group=part.group)
    return collected


def _without_padding(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Rows beyond the model's, as of a vocabulary that is filled up, are cut off."""
    return tensor if shape is None or tensor.shape[0] <= shape[0] else tensor[: shape[0]]


def buckets(tensors: Iterable[tuple[Entry, Tensor | None]], size_bytes: int) -> Iterator[Bucket]:
    """Tensors in buckets of at most so many bytes; a larger one is alone in its bucket.

    Every rank of a stage gets equally many buckets, empty ones where it gets no tensors.
    """
    bucket: Bucket = []
    filled = 0
    for entry, tensor in tensors:
        if filled and filled + entry.size_bytes > size_bytes:
            yield bucket
            bucket, filled = [], 0
        if tensor is not None:
            bucket.append((entry.name, tensor))
        filled += entry.size_bytes
    if filled:
        yield bucket
