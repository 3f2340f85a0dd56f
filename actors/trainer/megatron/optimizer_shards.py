"""Distributed optimizer state in checkpoints: each rank writes and reads its own shards, in place.

Megatron distributes a bucket of flattened parameters over the replicas, so that a rank owns a range of each of some
parameters. A range of a flattened matrix consists of at most three boxes: the end of a row, whole rows, the start of a
row. Boxes are saved under the parameter's name and shape. Any parallel layout, any bucket size and the non-distributed
optimizer can therefore read them. Megatron's own formats are more limited: fully_reshardable gathers all parameters on
every rank, and dp_reshardable needs equal tensor-, pipeline- and expert-parallel sizes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from torch import Tensor

PREFIX: Final = "optimizer.state."
STATE: Final = ("param", "exp_avg", "exp_avg_sq")  # of each parameter; the step count is common to all


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cover a range of a flattened tensor with boxes, in order.

    Args:
        shape: Shape of the tensor, at least one dimension.
        begin: First element of the range.
        end: Element after the last one of the range.
    """
    if len(shape) == 1:
        if begin < end:
            yield Box((begin,), (end - begin,))
        return
    size = math.prod(shape[1:])  # of a row
    first, last = -(-begin // size), end // size  # whole rows
    if first > last:  # within one row
        yield from _of_row(shape, last, begin - last * size, end - last * size)
        return
    if begin < first * size:
        yield from _of_row(shape, first - 1, begin - (first - 1) * size, size)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * size < end:
        yield from _of_row(shape, last, 0, end - last * size)


def _of_row(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    for box in boxes(shape[1:], begin, end):
        yield Box((row, *box.offset), (1, *box.sizes))


def sharded_optimizer(parts: Sequence[Any], described: Mapping[int, Any]) -> dict[str, list[Any]]:
    """Describe this rank's optimizer state for Megatron's dist_checkpointing. The tensors are the live ones.

    Args:
        parts: Megatron's distributed optimizers of this rank, with filled state.
        described: Megatron's sharded tensor of each model parameter, by the parameter's id.
    """
    found: dict[str, list[Any]] = {name: [] for name in STATE}
    for part in parts:
        for parameter, stretch in _own_stretches(part):
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for piece, first in _pieces(described[id(parameter)]):
                begin = max(stretch.start, first)
                end = min(stretch.end, first + math.prod(piece.local_shape))
                for name in STATE if begin < end else ():
                    own = tensors[name][begin - stretch.start : end - stretch.start]
                    found[name] += _described(piece, name, own, begin - first)
    return found


def _own_stretches(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parameters whose optimizer state is on this rank, with the range of each."""
    for buffers in part.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _pieces(leaf: Any) -> Iterator[tuple[Any, int]]:
    """Yield the tensors that represent a parameter in a checkpoint, and the parameter's element where each starts.

    Gate and up projection are one parameter in the model, but two pieces of one tensor in the checkpoint.
    """
    if not hasattr(leaf, "build"):
        yield leaf, 0
        return
    built = leaf.build()
    for piece in built.values() if isinstance(built, dict) else built:
        assert piece.data.is_contiguous(), f"{leaf.key} is not sharded along its first dimension"
        yield piece, piece.data.storage_offset() - leaf.data.storage_offset()


def _described(piece: Any, name: str, own: Tensor, begin: int) -> Iterator[Any]:
    """Yield this rank's range of a piece, box by box."""
    prepended, at = piece.prepend_axis_num, 0  # a tensor stacked over layers has one dimension more
    for box in boxes(piece.local_shape, begin, begin + own.numel()):
        numel = math.prod(box.sizes)
        sizes, offset = (1,) * prepended + box.sizes, (0,) * prepended + box.offset
        yield replace(
            piece,
            key=f"{PREFIX}{name}.{piece.key}",
            data=own[at : at + numel].view(sizes),
            dtype=own.dtype,
            local_shape=sizes,
            global_offset=tuple(one + other for one, other in zip(piece.global_offset, offset, strict=True)),
            axis_fragmentations=None,  # the boxes form no regular grid
            prepend_axis_num=0,
            replica_id=(*piece.replica_id[:-1], 0),  # only this replica has the data
        )
        at += numel
