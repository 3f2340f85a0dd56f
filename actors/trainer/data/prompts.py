"""Samples behind one copy of their prompt: units of a packed row, and its layout.

A unit is a prompt and the responses of samples that have it, one after the other. A position of a response sees the
prompt and its own response; it has the place that it has in its sample. All outputs are those of whole samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import (
    WHOLE,
    MicroBatch,
    SharedPrompts,
    TrainBatch,
    packed_lengths,
    part_of,
    with_targets,
)
from actors.trainer.data.context import Context, Ints

PROMPT: Final = -1  # owner of a position of a prompt
PADDING: Final = -2
DENSE: Final = 2  # a unit's mask is dense: each position costs what it would see without causality


def prompt_lengths(batch: TrainBatch) -> Ints:
    """Return the tokens of each sample before the first that was sampled or trains, [B]."""
    sampled_N = (batch.staleness_N >= 0) | (batch.loss_mask_N != 0)
    place_N = np.arange(len(sampled_N)) - np.repeat(batch.starts_B, batch.lengths_B)
    firsts_N = np.where(sampled_N, place_N, np.repeat(batch.lengths_B, batch.lengths_B))
    return np.minimum.reduceat(firsts_N, batch.starts_B).astype(np.int64)


def units_of(batch: TrainBatch, samples: Ints, *, max_tokens: int, attention: float) -> list[Ints]:
    """Group samples by the ids of their prompts.

    A sample joins a unit as long as this costs less than to compute the sample alone, and the unit has room.

    Args:
        batch: The whole batch.
        samples: Samples to group.
        max_tokens: Largest unit. A longer sample is alone in one.
        attention: Attention cost of each position that a token may see, in tokens.

    Returns:
        The samples of each unit, in order of their first samples.
    """
    prompts_B = prompt_lengths(batch)
    by_prompt: dict[bytes, list[list[int]]] = {}
    for sample in samples.tolist():
        start, prompt = int(batch.starts_B[sample]), int(prompts_B[sample])
        units = by_prompt.setdefault(batch.tokens_N[start : start + prompt].tobytes(), [])
        if units and _joins(batch, prompts_B, units[-1], sample, max_tokens, attention):
            units[-1].append(sample)
        else:
            units.append([sample])
    units = sorted(unit for units in by_prompt.values() for unit in units)
    return [np.array(unit, dtype=np.int64) for unit in units]


def _joins(batch: TrainBatch, prompts_B: Ints, unit: list[int], sample: int, max_tokens: int, attention: float) -> bool:
    """Whether a sample is cheaper in a unit than alone, and fits in."""
    prompt = int(prompts_B[sample])
    before = prompt + int((batch.lengths_B[unit] - 1 - prompt).sum())
    alone = int(batch.lengths_B[sample]) - 1
    own = alone - prompt
    if not prompt or own < 0 or before + own > max_tokens:
        return False
    joined = own + DENSE * attention * ((before + own) ** 2 - before**2)
    return joined < alone + attention * alone**2


def unit_lengths(batch: TrainBatch, units: Sequence[Ints]) -> Ints:
    """Return the positions of each unit."""
    prompts_B = prompt_lengths(batch)
    return np.array([_positions(batch, prompts_B, unit) for unit in units], dtype=np.int64)


def _positions(batch: TrainBatch, prompts_B: Ints, unit: Ints) -> int:
    inputs = np.maximum(batch.lengths_B[unit] - 1, 1)
    shared = int(prompts_B[unit[0]]) if len(unit) > 1 else 0
    return shared + int((inputs - shared).sum())


def make_shared_micro_batch(
    batch: TrainBatch, units: Iterable[Ints], *, multiple: int, context: Context = WHOLE
) -> MicroBatch:
    """Lay units out in one packed row. The last token of each sample is only predicted, never an input.

    Args:
        batch: The whole batch.
        units: At least one unit, as `units_of` returns them.
        multiple: Divisor of the row length, for sequence and context parallelism.
        context: Context-parallel rank that gets this part of each unit.
    """
    units, prompts_B = list(units), prompt_lengths(batch)
    samples = np.concatenate(units)
    lengths = packed_lengths(unit_lengths(batch, units), multiple, context)
    size = int(lengths.sum())
    sources, owners = np.full(size, -1, dtype=np.int64), np.full(size, PADDING, dtype=np.int64)
    places = np.concatenate([np.arange(length) for length in lengths.tolist()])
    rows: list[Ints] = []
    columns: list[Ints] = []
    numbers: list[Ints] = []
    number = 0
    for unit, start in zip(units, (np.cumsum(lengths) - lengths).tolist(), strict=False):
        shared = int(prompts_B[unit[0]]) if len(unit) > 1 else 0
        first, row = int(batch.starts_B[unit[0]]), int(start)
        sources[row : row + shared] = np.arange(first, first + shared)
        owners[row : row + shared] = PROMPT
        row += shared
        for sample in unit.tolist():
            begin, inputs = int(batch.starts_B[sample]), int(batch.lengths_B[sample]) - 1
            own = slice(row, row + max(inputs, 1) - shared)
            sources[own] = np.arange(begin + shared, begin + inputs) if inputs else -1
            owners[own], places[own] = number, np.arange(shared, max(inputs, 1))
            trained = np.flatnonzero(batch.loss_mask_N[begin + 1 : begin + inputs + 1])  # place of what predicts it
            rows.append(np.where(trained < shared, start + trained, row - shared + trained))
            columns.append(begin + 1 + trained)
            numbers.append(np.full(len(trained), number))
            row, number = own.stop, number + 1
    tokens = np.where(sources >= 0, batch.tokens_N[np.maximum(sources, 0)], 0).astype(np.int64)
    columns_M = np.concatenate(columns)
    num_inputs = int(np.maximum(batch.lengths_B[samples] - 1, 0).sum()) if context.rank == 0 else 0
    whole = MicroBatch(
        tokens=tokens[None],
        rows_M=np.concatenate(rows),
        targets_M=batch.tokens_N[columns_M].astype(np.int64),
        columns_M=columns_M,
        samples=samples,
        sources=sources[None],
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        shared=SharedPrompts(places, owners, np.concatenate(numbers), tuple(units), num_inputs),
    )
    return with_targets(batch, part_of(whole, lengths, context))


def shared_without(batch: TrainBatch, micro_batch: MicroBatch, masked_B: NDArray[np.bool_]) -> MicroBatch:
    """Replace masked samples by padding, and prompts of units without another sample. All else keeps its position."""
    shared, bounds = micro_batch.shared, micro_batch.bounds
    assert shared is not None
    assert bounds is not None
    lengths, masked = np.diff(bounds).astype(np.int64), masked_B[micro_batch.samples]
    is_gone = np.append(masked, [True, False])[shared.owners]  # padding, then prompts: by the owners -2 and -1
    alone = np.ones(len(lengths), dtype=bool)  # the padding of the row, too
    alone[: len(shared.units)] = [masked_B[unit].all() for unit in shared.units]
    is_gone |= (shared.owners == PROMPT) & np.repeat(alone, lengths)
    gone = is_gone[micro_batch.context.kept(lengths)][None]
    kept_M = ~masked[shared.numbers_M]
    left = micro_batch.samples[~masked]
    num_inputs = int(np.maximum(batch.lengths_B[left] - 1, 0).sum()) if micro_batch.context.rank == 0 else 0
    owners = np.where(is_gone, PADDING, shared.owners)
    again = replace(
        micro_batch,
        tokens=np.where(gone, 0, micro_batch.tokens),
        sources=np.where(gone, -1, micro_batch.sources),
        rows_M=micro_batch.rows_M[kept_M],
        targets_M=micro_batch.targets_M[kept_M],
        columns_M=micro_batch.columns_M[kept_M],
        shared=replace(shared, owners=owners, numbers_M=shared.numbers_M[kept_M], num_inputs=num_inputs),
    )
    return with_targets(batch, again)
