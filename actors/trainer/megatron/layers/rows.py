"""Packed rows and their attention metadata, computed once per micro-batch so that no layer waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.data.batch import SharedPrompts
from actors.trainer.data.context import Context, Ints
from actors.trainer.data.prompts import PADDING, PROMPT
from actors.trainer.megatron.columns import on_device
from actors.trainer.megatron.imports import PackedSeqParams, parallel_state
from actors.trainer.megatron.layers.blockwise import Plan, Row
from actors.trainer.megatron.layers.delta_rule import Chunks

SHORT_UNIT: Final = 192  # positions up to which units are computed whole: a call for each sample takes 4 times longer


@dataclass(frozen=True)
class QueryBlock:
    """Queries of a row and the keys up to the last query, for torch's variable-length kernel."""

    rows: Tensor  # positions of the queries in this rank's part; empty: all positions
    seen: Tensor  # positions of the keys in the whole row; empty: all positions
    bounds: Tensor  # cu_seqlens of the queries, int32
    key_bounds: Tensor
    longest: int
    longest_keys: int


class Positions:
    """Position of each token in its sequence. Megatron passes it to the rotary embedding as cu_seqlens."""

    def __init__(self, column: Tensor) -> None:
        self.column = column
        self._waves: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def angles(self, by_position: Tensor) -> Tensor:
        """Select the angles of the row's tokens, [t, 1, 1, d], from those of all positions."""
        return by_position[self.column]

    def waves(self, by_position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the row's angles, cached by `by_position`."""
        key = (by_position.data_ptr(), by_position.shape, dtype)
        if key not in self._waves:
            angles = self.angles(by_position)
            self._waves[key] = (angles.cos().to(dtype), angles.sin().to(dtype), by_position)  # keeps its address in use
        return self._waves[key][:2]


class PackedRow(PackedSeqParams):
    """Megatron's PackedSeqParams, with the metadata of our attention."""

    def __init__(
        self, lengths: Ints, context: Context, device: torch.device, shared: SharedPrompts | None = None
    ) -> None:
        """Compute all metadata except plans and masks.

        Args:
            lengths: Lengths of the whole sequences, or units.
            context: Context-parallel rank that holds this part of each sequence.
            device: Device of the row.
            shared: Prompts that samples share. None: none.
        """
        starts, kept = np.cumsum(lengths) - lengths, context.kept(lengths)
        within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        within = within if shared is None else shared.places
        positions, *others = on_device([within[kept], *_columns(lengths, starts, context)], device)
        places, longest = Positions(positions), int(lengths.max())
        super().__init__(
            qkv_format="thd", cu_seqlens_q=places, cu_seqlens_kv=places, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        self.order: Tensor | None = None  # index of each position in the concatenated parts of all ranks
        if context.size == 1:
            bounds, everything = others[0].to(torch.int32), positions[:0]
            self.stretches = [QueryBlock(everything, everything, bounds, bounds, longest, longest)]
        else:
            self.order, *others = others
            self.stretches = [
                QueryBlock(
                    rows=others[4 * index],
                    seen=others[4 * index + 1],
                    bounds=others[4 * index + 2].to(torch.int32),
                    key_bounds=others[4 * index + 3].to(torch.int32),
                    longest=int(queries.max()),
                    longest_keys=int(keys.max()),
                )
                for index, (queries, keys) in enumerate(_halves(lengths, context))
            ]
        self._lengths, self._context, self._device = lengths, context, device
        self._shared = shared
        self.choices: dict[int, list[Plan] | None] = {}  # by number of a layer with an indexer, what it chose
        self._plans: dict[int | None, Plan] = {}
        self._masks: dict[int | None, Tensor] = {}

    @cached_property
    def row(self) -> Row:
        """The row's positions."""
        return Row.of(self._lengths, self._context, self._shared)

    @cached_property
    def units(self) -> "Units | None":
        """The row's units as rows of their own. None: no prompt is shared, a unit is long, or others have parts."""
        if self._shared is None or self._context.size > 1 or int(self._lengths.max()) > SHORT_UNIT:
            return None
        return _units(self._lengths, self.row.owners, self._device)

    @cached_property
    def chunks(self) -> Chunks:
        """The row's positions as linear attention computes them."""
        return Chunks.of(self.row, self._device)

    def plan(self, window: int | None) -> Plan:
        """Return the ranges of queries and keys of attention on the CPU, cached by window.

        Args:
            window: Number of keys that a query sees, its own among them. None: all up to its own.
        """
        if window not in self._plans:
            self._plans[window] = self.row.plan(window)
        return self._plans[window]

    def mask(self, window: int | None) -> Tensor:
        """Return the attention mask [queries, keys], cached by window; see `Row.mask`."""
        if window not in self._masks:
            self._masks[window] = self.row.mask(window).to(self._device)
        return self._masks[window]


class PaddedRows(PackedSeqParams):
    """What layers of sparse attention share of a padded micro-batch, in the place of a packed row."""

    def __init__(self) -> None:
        super().__init__(qkv_format="sbhd")
        self.choices: dict[int, list[Plan] | None] = {}  # as of a packed row


class Units(NamedTuple):
    """Units of a packed row as rows of equal length."""

    places: Tensor  # [b * s], position in the packed row; 0 in padding
    back: Tensor  # [t], position of each position of the packed row in those rows
    size: tuple[int, int]  # b, s
    hidden: Tensor  # [b, 1, 1, s, s], true where a query does not see a key


def packing(
    bounds: NDArray[np.int32] | None, device: torch.device, shared: SharedPrompts | None = None
) -> PackedRow | None:
    """Build the PackedSeqParams of a packed row.

    Args:
        bounds: Start of each whole sequence, then the end. None: the batch is padded.
        device: Device of the row.
        shared: Prompts that samples share. None: none.
    """
    return None if bounds is None else PackedRow(np.diff(bounds).astype(np.int64), own_context(), device, shared)


def own_context() -> Context:
    """Return this rank's context-parallel rank and size."""
    return Context(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


def _halves(lengths: Ints, context: Context) -> list[tuple[Ints, Ints]]:
    """Return the numbers of queries and of visible keys of each sequence, for each of this rank's two chunks."""
    chunks = lengths // context.multiple
    return [(chunks, (which + 1) * chunks) for which in (context.rank, context.multiple - 1 - context.rank)]


def _columns(lengths: Ints, starts: Ints, context: Context) -> Sequence[Ints]:
    """Return a row's index arrays: sequence bounds; with context parallelism, order, rows and keys of each chunk."""
    if context.size == 1:
        return [_bounds(lengths)]
    columns = [context.order(lengths)]
    for index, (queries, keys) in enumerate(_halves(lengths, context)):
        rows = _ranges(starts // context.size + index * queries, queries)
        columns += [rows, _ranges(starts, keys), _bounds(queries), _bounds(keys)]
    return columns


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the positions of the ranges, concatenated."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within


def _units(lengths: Ints, owners: Ints, device: torch.device) -> Units:
    """Lay the units out as rows. A position of padding sees itself."""
    starts, within = np.cumsum(lengths) - lengths, np.arange(int(lengths.max()))
    real = within < lengths[:, None]
    places = np.where(real, starts[:, None] + within, 0)
    owners = np.where(real, owners[places], PADDING)
    sees = (owners[:, None, :] == owners[:, :, None]) | (owners[:, None, :] == PROMPT)
    sees &= within[:, None] >= within
    placed, back = on_device([places.ravel(), np.flatnonzero(real)], device)
    return Units(placed, back, (len(lengths), len(within)), torch.from_numpy(~sees[:, None, None]).to(device))
