"""Gathering of full tensors under Hugging Face's names, from a pipeline stage's ranks to its first rank.

Every weight export, to files or to engines, goes through `buckets`. All ranks of a stage iterate over it together. The
first rank of the stage, in the first data-parallel replica, receives the tensors. The other ranks contribute their
shards, and skip tensors of which they hold no shard.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.lora.adapters import adapters_of, merge_of
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.models.names import split_for_hf
from actors.trainer.models.shapes import hf_shapes, weights_of
from actors.trainer.models.sharding import cut_of, global_name, is_of_expert, names_of, tensors_of
from actors.trainer.models.shards import Entry, entry_of

Bucket = list[tuple[str, Tensor]]  # full tensors by Hugging Face name, on this rank's device


class Part(NamedTuple):
    """A tensor of this rank's model, possibly a shard, and the ranks that hold the other shards."""

    names: tuple[str, ...]  # Megatron names on the ranks of the group; they differ only for experts
    tensor: Tensor
    dim: int  # dimension along which shards are joined
    num_parts: int  # shards of each name; the group's ranks are ordered by name, then shard
    group: Any  # torch process group
    merge: Callable[[], Tensor] | None = None  # merges an adapter into `tensor`; None: it has none

    def values(self) -> Tensor:
        """Return the values to export, shaped like `tensor`."""
        return self.tensor if self.merge is None else self.merge()


def own_parts(chunks: Sequence[Any], model: HfConfig, *, merged: bool = True) -> list[Part]:
    """List this rank's tensors in export order. They are the model's own tensors, not copies; adapters are merged late.

    Args:
        chunks: the rank's GPTModels.
        model: configuration that they were built from.
        merged: merge adapters; else the tensors are those of the base model.
    """
    return [part for built in chunks for part in _parts_of(built, model, merged=merged)]


def _parts_of(built: Any, model: HfConfig, *, merged: bool) -> Iterator[Part]:
    adapters = adapters_of(built) if merged else {}
    for name, tensor in tensors_of(built):
        if not _is_copy(name, built, model):
            yield _part(global_name(name, built), tensor, model)._replace(merge=merge_of(adapters, name, tensor))


def _is_copy(name: str, built: Any, model: HfConfig) -> bool:
    """Whether a tensor duplicates one of the first pipeline stage: a tied output weight, or an embedding for MTP."""
    if name == "output_layer.weight":
        return model.tie_word_embeddings
    return name.startswith("embedding.") and not built.pre_process


def _part(name: str, tensor: Any, model: HfConfig) -> Part:
    """Describe a tensor and its shards. Expert-parallel ranks hold different experts under one name."""
    cut = cut_of(name, tensor)
    dim, count = (0, 1) if cut is None else (cut.dim, cut.count)
    ranks = range(parallel_state.get_expert_model_parallel_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    if is_of_expert(name):
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return Part(names_of(name, model, *ranks), tensor.data, dim, count, group)


def first_rank() -> int:
    """Return the rank of this pipeline stage that receives full tensors."""
    return dist.get_process_group_ranks(stage_group())[0]


def stage_group() -> Any:
    """Return the process group of all ranks of this pipeline stage."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def whole_entries(parts: Iterable[Part], model: HfConfig) -> list[Entry]:
    """List the entries of all tensors that `whole_tensors` yields, without communication."""
    shapes = hf_shapes(model)
    entries = ((entry, None) for part in parts for entry in _entries(part, model, shapes))
    return [entry for entry, _ in stacked(entries, model)]


def stacked(tensors: Iterable[tuple[Entry, Tensor | None]], model: HfConfig) -> Iterator[tuple[Entry, Tensor | None]]:
    """Join the tensors of all experts that the files hold as one, `NAME[3]`, once the last has come."""
    waiting: dict[str, dict[int, tuple[Entry, Tensor | None]]] = {}
    for entry, tensor in tensors:
        name, bracket, number = entry.name.removesuffix("]").partition("[")
        if not bracket or model.experts is None:
            yield entry, tensor
            continue
        found = waiting.setdefault(name, {})
        found[int(number)] = entry, tensor
        if len(found) == model.experts.num_experts:
            own = [tensor for _, (_, tensor) in sorted(waiting.pop(name).items()) if tensor is not None]
            shape, size = (len(found), *entry.shape), len(found) * entry.size_bytes
            yield Entry(name, entry.dtype, shape, size), torch.stack(own) if own else None
    assert not waiting, f"experts of {min(waiting)} are missing"


def _entries(part: Part, model: HfConfig, shapes: Mapping[str, Sequence[int]]) -> list[Entry]:
    """Describe the full tensors that a part becomes, joined with those of other ranks, under Hugging Face's names."""
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
    """Yield every tensor of this stage, with data on the first rank and None on the others. A collective of the stage.

    Args:
        parts: this rank's parts, or copies of them.
        model: configuration of the full model.
        device: device of this rank; the parts may be on another one.
    """
    first, shapes = first_rank(), hf_shapes(model)
    wholes = (whole for part in parts for whole in _wholes(part, _entries(part, model, shapes), model, first, device))
    yield from stacked(wholes, model)


def _wholes(
    part: Part, entries: Sequence[Entry], model: HfConfig, first: int, device: torch.device
) -> Iterator[tuple[Entry, Tensor | None]]:
    """Yield the full tensors of one part. Afterwards no reference to them remains here."""
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
    """Yield the full tensors of one name, joined from its stacked shards."""
    split = [split_for_hf(name, model, piece, parts=part.num_parts) for piece in own]
    if part.dim == 0 and len(split[0]) == 1 and part.num_parts > 1:
        yield own.flatten(0, 1)
        return
    if part.num_parts > 1 and weights_of(model)[name].is_stored_joined:
        yield torch.cat([piece for same in zip(*split, strict=True) for _, piece in same])
        return
    for same in zip(*split, strict=True):
        yield same[0][1] if part.num_parts == 1 else torch.cat([piece for _, piece in same], dim=part.dim)


def _collected(part: Part, first: int, device: torch.device) -> Tensor | None:
    """Gather the shards of all ranks of the group, stacked, on the stage's first rank. None on the other ranks."""
    if part.num_parts == len(part.names) == 1:  # not sharded: other ranks have copies
        return part.values().to(device)[None] if dist.get_rank() == first else None
    ranks = dist.get_process_group_ranks(part.group)
    if ranks[0] != first:  # group of another replica
        return None
    own = part.values().to(device).contiguous()
    collected = own.new_empty(len(ranks), *own.shape) if dist.get_rank() == first else None
    dist.gather(own, None if collected is None else list(collected), dst=first, group=part.group)
    return collected


def _without_padding(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Remove rows beyond the model's shape, such as vocabulary padding."""
    return tensor if shape is None or tensor.shape[0] <= shape[0] else tensor[: shape[0]]


def buckets(tensors: Iterable[tuple[Entry, Tensor | None]], size_bytes: int) -> Iterator[Bucket]:
    """Group tensors into buckets of at most `size_bytes`. A larger tensor gets its own bucket.

    Every rank of a stage gets the same number of buckets. They are empty on ranks that receive no tensors.
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
