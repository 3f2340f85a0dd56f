"""A batch as ragged columns, and a part of it laid out for one forward pass.

B samples, N tokens of all samples one after another, R rollouts, M tokens that train in one micro-batch. A column holds
a number per token: element i describes token i, which the model predicts at position i - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actors.trainer.batches.context import Context, Ints

WHOLE = Context()
Floats32 = NDArray[np.float32]
ExpertIds = NDArray[np.uint8 | np.int16]  # `NOT_KNOWN`, which is 255 in the former, where there is none
NOT_KNOWN: Final = -1


def expert_ids(values: NDArray[Any], highest: int) -> ExpertIds:
    """Numbers of experts, or -1, in as few bytes as they take.

    Args:
        values: the numbers.
        highest: of them, and of others that are to have the same form.
    """
    return values.astype(np.uint8) if highest < 255 else values.astype(np.int16)


def only_where(known: NDArray[np.bool_], ids: ExpertIds) -> ExpertIds:
    """Numbers [..., E] of experts where a position is known, and elsewhere none."""
    return np.where(known[..., None], ids, np.array(NOT_KNOWN).astype(ids.dtype))


class LeftOut(IntEnum):
    """Why the tokens of a sample are not in its batch."""

    NO = 0
    TOO_LONG = 1  # for a rank
    INVALID = 2  # they cannot be true


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The samples of one train step, grouped by rollout and in order of issue."""

    step: int
    groups_B: Ints  # prompt group
    rollouts_B: Ints  # 0 .. R - 1, rising; equal for the parts of one rollout
    indices_B: Ints  # of the sample in its group
    parts_B: Ints  # of the sample among those of its index
    rewards_B: NDArray[np.float64]
    raw_rewards_B: NDArray[np.float64]  # before graders shaped them; only shown
    truncated_B: NDArray[np.uint8]  # 1 where the response ran into its limit
    left_out_B: NDArray[np.uint8]  # why the sample has one token and no loss (LeftOut), though it counts; 0: it has all
    lengths_B: Ints  # tokens
    tokens_N: NDArray[np.int32]
    loss_mask_N: NDArray[np.uint8]  # 1 where the token trains
    rollout_log_probs_N: Floats32  # of the policy that sampled; 0 where the token does not train
    staleness_N: NDArray[np.int32]  # train steps; 0: sampled by the weights that this step starts from; -1: not sampled
    routed_experts_N: ExpertIds | None = None  # [N, E]: of tokens that are read E of all layers; on rank 0 alone
    ref_log_probs_N: Floats32 | None = None  # of the reference, computed before; NaN: of a group that they were not
    old_log_probs_N: Floats32 | None = None  # of the weights that this step starts from; likewise

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in vars(self).items() if name != "step" and values is not None}
        for suffix, size in (("_B", len(self.lengths_B)), ("_N", int(self.lengths_B.sum()))):
            wrong = {name: length for name, length in lengths.items() if name.endswith(suffix) and length != size}
            if wrong:
                raise ValueError(f"step {self.step}: expected {size} entries, got {wrong}")
        if not lengths["lengths_B"]:
            raise ValueError(f"step {self.step}: the batch has no samples")

    @cached_property
    def starts_B(self) -> Ints:
        """Where each sample's tokens begin in the columns."""
        return np.concatenate([[0], np.cumsum(self.lengths_B)[:-1]]).astype(np.int64)

    @cached_property
    def mask_sums_B(self) -> Ints:
        """Tokens of each sample that train."""
        return np.add.reduceat(self.loss_mask_N.astype(np.int64), self.starts_B)

    def tokens_of(self, samples: Ints) -> Ints:
        """Where the tokens of some samples are in the columns."""
        lengths = self.lengths_B[samples]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(self.starts_B[samples], lengths) + within

    def spread(self, values_B: NDArray[np.float64]) -> Floats32:
        """A column from one number per sample."""
        return np.repeat(values_B.astype(np.float32), self.lengths_B)


@dataclass(frozen=True)
class Further:
    """What a further layer takes of a micro-batch, to predict F tokens that come after the next one."""

    tokens: Ints  # like the micro-batch's: the token behind each one that is read; 0 in padding
    rows_F: Ints  # positions, over tokens flattened, whose token after the next one trains
    targets_F: Ints  # those tokens


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes."""

    tokens: Ints  # [b, s] padded on the right, or [1, t] packed
    rows_M: Ints  # positions, over tokens flattened, whose output predicts a token that trains
    targets_M: Ints  # those tokens
    columns_M: Ints  # where those tokens are in the batch's columns
    samples: Ints  # of the batch, that are in here
    sources: Ints  # like tokens: where the token that is read is in the batch's columns; -1: there is padding
    bounds: NDArray[np.int32] | None = None  # packed: where each whole sequence begins, and the end
    experts: dict[int, Any] = field(default_factory=dict[int, Any])  # by layer, of an earlier forward pass
    routed_experts: ExpertIds | None = None  # [b, s, E], of all layers, as the engine chose
    further: Further | None = None  # what a further layer predicts; none: nothing
    context: Context = WHOLE  # whose part of each sequence it is

    @property
    def num_sequences(self) -> int:
        """Of all context-parallel ranks together, and with what a packed row is padded by."""
        return len(self.tokens) if self.bounds is None else len(self.bounds) - 1

    @cached_property
    def sequences(self) -> Ints:
        """Like tokens: the number of the sequence that a position is of."""
        if self.bounds is None:
            return np.repeat(np.arange(len(self.tokens)), self.tokens.shape[1]).reshape(self.tokens.shape)
        lengths = np.diff(self.bounds).astype(np.int64)
        return np.repeat(np.arange(len(lengths)), lengths)[self.context.kept(lengths)][None]

    @cached_property
    def num_tokens(self) -> int:
        """Positions that read a token."""
        return int(np.count_nonzero(self.sources >= 0))


def make_micro_batch(
    batch: TrainBatch, samples: Ints, *, packed: bool, multiple: int = 1, context: Context = WHOLE
) -> MicroBatch:
    """Lay samples out for a forward pass. The last token of each is only predicted, never read.

    Args:
        batch: the whole batch.
        samples: which of it; none gives positions without loss, so that all replicas run equally often.
        packed: behind each other instead of padded.
        multiple: of positions that a row must divide by, as sequence and context parallelism need.
        context: whose part of each sequence it is to be.
    """
    if not len(samples):
        return empty_micro_batch(packed=packed, multiple=multiple, context=context)
    inputs = np.maximum(batch.lengths_B[samples] - 1, 1)
    longest = _round_up(int(inputs.max()), multiple)
    positions = np.arange(longest)
    columns = batch.starts_B[samples][:, None] + positions  # [b, s], of the token that is read
    real = positions < (batch.lengths_B[samples] - 1)[:, None]
    columns = np.where(real, columns, 0)
    trains = real & (batch.loss_mask_N[np.where(real, columns + 1, 0)] != 0)
    tokens = np.where(real, batch.tokens_N[columns], 0).astype(np.int64)
    row, position = np.nonzero(trains)
    lengths = packed_lengths(inputs, multiple, context) if packed else np.full(len(samples), longest)
    flat = np.zeros(int(lengths.sum()), dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    sequence, place = np.nonzero(real)
    flat[starts[sequence] + place] = tokens[sequence, place]
    sources = np.full_like(flat, -1)
    sources[starts[sequence] + place] = columns[sequence, place]
    columns_M = columns[row, position] + 1
    whole = MicroBatch(
        tokens=flat[None] if packed else flat.reshape(len(samples), -1),
        rows_M=starts[row] + position,
        targets_M=batch.tokens_N[columns_M].astype(np.int64),
        columns_M=columns_M,
        samples=samples,
        sources=sources[None] if packed else sources.reshape(len(samples), -1),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if packed else None,
    )
    return part_of(whole, lengths, context)


def empty_micro_batch(*, packed: bool, multiple: int, context: Context) -> MicroBatch:
    """Positions without loss, for who must run as often as others."""
    nothing = np.empty(0, dtype=np.int64)
    return MicroBatch(
        tokens=np.zeros((1, multiple // context.size), dtype=np.int64),
        rows_M=nothing,
        targets_M=nothing,
        columns_M=nothing,
        samples=nothing,
        sources=np.full((1, multiple // context.size), -1),
        context=context,
        bounds=np.array([0, multiple], dtype=np.int32) if packed else None,
    )


def packed_lengths(inputs: Ints, multiple: int, context: Context) -> Ints:
    """What each sequence takes of a packed row; what the row is padded by is a sequence of its own, the last one."""
    lengths = -(-inputs // context.multiple) * context.multiple
    missing = -int(lengths.sum()) % multiple
    return np.append(lengths, missing) if missing else lengths


def part_of(whole: MicroBatch, lengths: Ints, context: Context) -> MicroBatch:
    """A context-parallel rank's part; the bounds stay those of whole sequences, as Megatron-core expects.

    Args:
        whole: to be cut.
        lengths: of its sequences in order, padding included.
        context: whose part.
    """
    if context.size == 1:
        return whole
    kept = context.kept(lengths)
    place = np.full(whole.tokens.size, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    own = place[whole.rows_M] >= 0
    return replace(
        whole,
        context=context,
        tokens=whole.tokens.ravel()[kept].reshape(len(whole.tokens), -1),
        sources=whole.sources.ravel()[kept].reshape(len(whole.tokens), -1),
        rows_M=place[whole.rows_M[own]],
        targets_M=whole.targets_M[own],
        columns_M=whole.columns_M[own],
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def num_padded_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Positions that a forward pass over micro-batches computes, padding included."""
    return sum(micro_batch.tokens.size for micro_batch in micro_batches)
