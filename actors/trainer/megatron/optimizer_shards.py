"""The distributed optimizer's state in a checkpoint: each rank writes and reads its own part, in place.

Megatron shares a bucket of flattened parameters out among the replicas, so that a rank has a stretch of each of some
parameters. A stretch of a flattened matrix is at most three boxes of it: the end of a row, whole rows, the begin of a
row. Boxes are saved under the parameter's name and shape, so that every layout reads them, whatever its sizes and
buckets, and that of the optimizer that is not distributed. Megatron's own formats gather all parameters on every
rank (fully_reshardable), or are read by the same tensor-, pipeline- and expert-parallel sizes alone (dp_reshardable).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from torch import Tensor

PREFIX: Final = "optimizer.state."
STATE: Final = ("param", "exp_avg", "exp_avg_sq")  # of each parameter; its step count is common to all


class Box(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cover a stretch of a flattened tensor, in its order.

    Args:
        shape: of the tensor, at least one dimension.
        begin: the first element of the stretch.
        end: the element behind its last one.
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
    """Describe this rank's part of the optimizer's state to Megatron's dist_checkpointing. Tensors are the live ones.

    Args:
        parts: Megatron's distributed optimizers of this rank, with filled state.
        described: Megatron's description of each parameter of the model, by its id.
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
    """Parameters of which this rank has optimizer state, and which stretch of each."""
    for buffers in part.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"]


def _pieces(leaf: Any) -> Iterator[tuple[Any, int]]:
    """What becomes of a parameter in a checkpoint, and at which of its elements each piece begins.

    Gate and up projection are one parameter here, and two pieces of one tensor there.
    """
    if not hasattr(leaf, "build"):
        yield leaf, 0
        return
    built = leaf.build()
    for piece in built.values() if isinstance(built, dict) else built:
        assert piece.data.is_contiguous(), f"{leaf.key} is cut along other than its first dimension"
        yield piece, piece.data.storage_offset() - leaf.data.storage_offset()


def _described(piece: Any, name: str, own: Tensor, begin: int) -> Iterator[Any]:
    """This rank's stretch of a piece, box by box."""
    prepended, at = piece.prepend_axis_num, 0  # a tensor of all layers has one dimension more
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
            axis_fragmentations=None,  # not a grid
            prepend_axis_num=0,
            replica_id=(*piece.replica_id[:-1], 0),  # no other replica has it
        )
        at += numel
