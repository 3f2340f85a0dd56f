"""Training batches as ragged columns, and micro-batches laid out for one forward pass.

B samples, N tokens of all samples concatenated, R rollouts, M trained tokens of one micro-batch, K kept tokens of all
tokens. A column holds one number per token: element i describes token i, which the model predicts at position i - 1.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.context import Context, Ints

WHOLE = Context()
Floats32 = NDArray[np.float32]
ExpertIds = NDArray[np.uint8 | np.int16]  # `NOT_KNOWN` (255 in uint8) where no expert is recorded
NOT_KNOWN: Final = -1


def expert_ids(values: NDArray[Any], highest: int) -> ExpertIds:
    """Convert expert numbers, or -1, to the smallest dtype that holds them.

    Args:
        values: The numbers.
        highest: Highest expert number, also of other arrays that need the same dtype.
    """
    return values.astype(np.uint8) if highest < 255 else values.astype(np.int16)


def only_where(known: NDArray[np.bool_], ids: ExpertIds) -> ExpertIds:
    """Keep expert ids, [..., E], where `known` is true; set `NOT_KNOWN` elsewhere."""
    return np.where(known[..., None], ids, np.array(NOT_KNOWN).astype(ids.dtype))


class KeptIds(NamedTuple):
    """Token ids that top-p and top-k kept when tokens were sampled, token after token."""

    ids_K: Ints
    counts_M: Ints  # number of ids of each token; 0: the whole vocabulary


class TeacherTopk(NamedTuple):
    """A teacher's likeliest tokens at some places, and their log-probs by the teacher."""

    ids: Ints  # [M, K]
    log_probs: Floats32  # [M, K]


class LeftOut(IntEnum):
    """Reason why a sample's tokens are left out of its batch."""

    NO = 0
    TOO_LONG = 1  # over the length limit
    INVALID = 2  # inconsistent or impossible values


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Samples of one train step, grouped by rollout and in order of issue."""

    step: int
    groups_B: Ints  # prompt group
    rollouts_B: Ints  # 0 .. R - 1, rising; equal for the parts of one rollout
    indices_B: Ints  # index of the sample in its group
    parts_B: Ints  # part among the samples with that index
    rewards_B: NDArray[np.float64]
    raw_rewards_B: NDArray[np.float64]  # before reward shaping; for metrics only
    truncated_B: NDArray[np.uint8]  # 1 where the response reached its length limit
    left_out_B: NDArray[np.uint8]  # LeftOut; if not 0, one token without loss stands for the sample, which still counts
    lengths_B: Ints  # tokens
    tokens_N: NDArray[np.int32]
    loss_mask_N: NDArray[np.uint8]  # 1 where the token trains
    rollout_log_probs_N: Floats32  # of the behaviour policy; 0 where the token does not train
    staleness_N: NDArray[np.int32]  # train steps; 0: sampled by the weights that this step starts from; -1: not sampled
    named_rewards_B: NDArray[np.float64] | None = None  # [B, K], of the recipe's reward keys; NaN where there is none
    baseline_rewards_B: NDArray[np.float64] | None = None  # of the group's greedy sample; NaN where there is none
    baseline_lens_B: Ints | None = None  # response tokens of that sample
    response_lens_B: Ints | None = None  # tokens after the first prompt, with those between the turns
    output_lens_B: Ints | None = None  # tokens that the engine sampled
    input_lens_B: Ints | None = None  # tokens of the prompt and between the turns
    num_turns_B: Ints | None = None  # requests with an input of their own, at least 1
    routed_experts_N: ExpertIds | None = None  # [N, E], E experts per input token over all layers; on rank 0 alone
    kept_counts_N: NDArray[np.int32] | None = None  # tokens that top-p and top-k kept; 0: all. None: all, everywhere
    kept_ids_K: NDArray[np.int32] | None = None  # their ids, those of the first token first
    temperatures_N: Floats32 | None = None  # that the turn was sampled at; 0: the recipe's. None: so everywhere
    ref_log_probs_N: Floats32 | None = None  # of the reference, precomputed; NaN for groups without precomputed values
    teacher_log_probs_N: Floats32 | None = None  # of teachers in engine pools; 0 where the token does not train
    teacher_topk_ids_N: NDArray[np.int32] | None = None  # [N, K], the teacher's likeliest tokens; 0 as above
    teacher_topk_log_probs_N: Floats32 | None = None  # [N, K], by the teacher
    token_rewards_N: Floats32 | None = None  # of the grader, also where no token trains; 0 with one reward per sample
    old_log_probs_N: Floats32 | None = None  # of the weights that this step starts from; NaN as above

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in vars(self).items() if name != "step" and values is not None}
        for suffix, size in (("_B", len(self.lengths_B)), ("_N", int(self.lengths_B.sum()))):
            wrong = {name: length for name, length in lengths.items() if name.endswith(suffix) and length != size}
            if wrong:
                raise ValueError(f"step {self.step + 1}: expected {size} entries, got {wrong}")
        num_kept = 0 if self.kept_counts_N is None else int(self.kept_counts_N.sum())
        if num_kept != lengths.get("kept_ids_K", 0):
            raise ValueError(
                f"step {self.step + 1}: {num_kept} kept tokens, got the ids of {lengths.get('kept_ids_K', 0)}"
            )
        if not lengths["lengths_B"]:
            raise ValueError(f"step {self.step + 1}: the batch has no samples")

    @cached_property
    def starts_B(self) -> Ints:
        """Start of each sample's tokens in the columns."""
        return np.concatenate([[0], np.cumsum(self.lengths_B)[:-1]]).astype(np.int64)

    @cached_property
    def kept_starts_N(self) -> Ints:
        """Start of each token's kept ids."""
        assert self.kept_counts_N is not None
        return np.cumsum(self.kept_counts_N, dtype=np.int64) - self.kept_counts_N

    def kept_of(self, columns_M: Ints) -> KeptIds | None:
        """Return the kept ids of some tokens; None if the batch has none."""
        if self.kept_counts_N is None or self.kept_ids_K is None:
            return None
        counts_M = self.kept_counts_N[columns_M].astype(np.int64)
        within = np.arange(int(counts_M.sum())) - np.repeat(np.cumsum(counts_M) - counts_M, counts_M)
        places = np.repeat(self.kept_starts_N[columns_M], counts_M) + within
        return KeptIds(self.kept_ids_K[places].astype(np.int64), counts_M)

    def topk_of(self, columns_M: Ints) -> TeacherTopk | None:
        """Return the teacher's likeliest tokens at the places of some tokens; None if the batch has none."""
        if self.teacher_topk_ids_N is None or self.teacher_topk_log_probs_N is None:
            return None
        ids_MK = self.teacher_topk_ids_N[columns_M].astype(np.int64)
        return TeacherTopk(ids_MK, self.teacher_topk_log_probs_N[columns_M])

    def temperatures_of(self, columns_M: Ints) -> Floats32 | None:
        """Return the temperatures of some tokens; None if all of the batch have the recipe's."""
        return None if self.temperatures_N is None else self.temperatures_N[columns_M]

    @cached_property
    def mask_sums_B(self) -> Ints:
        """Trained tokens of each sample."""
        return np.add.reduceat(self.loss_mask_N.astype(np.int64), self.starts_B)

    def tokens_of(self, samples: Ints) -> Ints:
        """Return the positions of the samples' tokens in the columns."""
        lengths = self.lengths_B[samples]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(self.starts_B[samples], lengths) + within

    def spread(self, values_B: NDArray[np.float64]) -> Floats32:
        """Expand one number per sample to a column. Numbers beyond float32 become infinite."""
        with np.errstate(over="ignore"):
            return np.repeat(values_B.astype(np.float32), self.lengths_B)


@dataclass(frozen=True)
class MtpInputs:
    """MTP (multi-token prediction) inputs of a micro-batch.

    A position with input token i also gets token i + 1, and predicts token i + 2. F tokens are predicted this way.
    """

    tokens: Ints  # shaped like the micro-batch's tokens: the token after each input token; 0 in padding
    rows_F: Ints  # positions in the flattened tokens whose second-next token trains
    targets_F: Ints  # those second-next tokens


@dataclass(frozen=True)
class SharedPrompts:
    """How samples share the prompts of a packed row, whose sequences are units (data/prompts.py)."""

    places: Ints  # [t] of the whole row: place of each position in its sample
    owners: Ints  # [t]: number of the sample in the micro-batch; -1: a prompt's, -2: padding
    numbers_M: Ints  # number of each target's sample in the micro-batch
    units: tuple[Ints, ...]  # samples of the batch in each unit
    num_inputs: int  # input tokens of the samples, a prompt as often as samples have it; 0 on later context ranks


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass."""

    tokens: Ints  # [b, s] padded on the right, or [1, t] packed
    rows_M: Ints  # positions in the flattened tokens whose output predicts a trained token
    targets_M: Ints  # those trained tokens
    columns_M: Ints  # positions of those tokens in the batch's columns
    samples: Ints  # samples of the batch in this micro-batch
    sources: Ints  # shaped like tokens: position of the input token in the batch's columns; -1 in padding
    bounds: NDArray[np.int32] | None = None  # packed: start of each whole sequence, then the end (cu_seqlens)
    experts: dict[int, Any] = field(default_factory=dict[int, Any])  # by layer, of an earlier forward pass
    routed_experts: ExpertIds | None = None  # [b, s, E], for all layers, as the engine chose
    kept: KeptIds | None = None  # tokens that the engine sampled each target from; None: the whole vocabulary
    topk: TeacherTopk | None = None  # [M, K] for each target; None: no term of the loss reads them
    temperatures_M: Floats32 | None = None  # of each target; 0: the recipe's. None: all of them
    mtp: MtpInputs | None = None  # MTP inputs; None: the model has no MTP layer
    context: Context = WHOLE  # context-parallel rank that holds this part of each sequence
    shared: SharedPrompts | None = None  # samples share prompts, and each sequence is a unit; None: they do not

    @property
    def num_sequences(self) -> int:
        """Number of sequences over all context-parallel ranks, including the padding sequence of a packed row.

        Samples that share prompts are a sequence each.
        """
        if self.shared is not None:
            return len(self.samples)
        return len(self.tokens) if self.bounds is None else len(self.bounds) - 1

    @property
    def numbers_M(self) -> Ints:
        """Number of each target's sequence."""
        return self.sequences.ravel()[self.rows_M] if self.shared is None else self.shared.numbers_M

    @cached_property
    def sequences(self) -> Ints:
        """Number of the sequence, or unit, at each position, shaped like tokens."""
        if self.bounds is None:
            return np.repeat(np.arange(len(self.tokens)), self.tokens.shape[1]).reshape(self.tokens.shape)
        lengths = np.diff(self.bounds).astype(np.int64)
        return np.repeat(np.arange(len(lengths)), lengths)[self.context.kept(lengths)][None]

    @cached_property
    def num_tokens(self) -> int:
        """Positions that hold an input token, counted as if no prompt were shared."""
        return int(np.count_nonzero(self.sources >= 0)) if self.shared is None else self.shared.num_inputs


def make_micro_batch(
    batch: TrainBatch, samples: Ints, *, packed: bool, multiple: int = 1, context: Context = WHOLE
) -> MicroBatch:
    """Lay samples out for a forward pass. The last token of each sample is only predicted, never an input.

    Args:
        batch: The whole batch.
        samples: Samples to lay out. If empty, the result has positions without loss, so that all replicas run the same
            number of passes.
        packed: Concatenate the sequences instead of padding them.
        multiple: Divisor of the row length, for sequence and context parallelism.
        context: Context-parallel rank that gets this part of each sequence.
    """
    if not len(samples):
        return empty_micro_batch(packed=packed, multiple=multiple, context=context)
    inputs = np.maximum(batch.lengths_B[samples] - 1, 1)
    longest = _round_up(int(inputs.max()), multiple)
    positions = np.arange(longest)
    columns = batch.starts_B[samples][:, None] + positions  # [b, s], position of the input token
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
    return with_targets(batch, part_of(whole, lengths, context))


def with_targets(batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
    """Add what the batch has of each target to a micro-batch."""
    columns_M = micro_batch.columns_M
    return replace(
        micro_batch,
        kept=batch.kept_of(columns_M),
        topk=batch.topk_of(columns_M),
        temperatures_M=batch.temperatures_of(columns_M),
    )


def empty_micro_batch(*, packed: bool, multiple: int, context: Context) -> MicroBatch:
    """Make a micro-batch without loss, for ranks that must run the same number of passes as others."""
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
    """Padded length of each sequence in a packed row. Padding of the row itself is one more sequence, at the end."""
    lengths = -(-inputs // context.multiple) * context.multiple
    missing = -int(lengths.sum()) % multiple
    return np.append(lengths, missing) if missing else lengths


def part_of(whole: MicroBatch, lengths: Ints, context: Context) -> MicroBatch:
    """Cut out a context-parallel rank's part, with the bounds of the whole sequences, as Megatron-core expects.

    Args:
        whole: Micro-batch to cut.
        lengths: Lengths of its sequences in order, padding included.
        context: Context-parallel rank that gets the part.
    """
    if context.size == 1:
        return whole
    kept = context.kept(lengths)
    place = np.full(whole.tokens.size, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    own = place[whole.rows_M] >= 0
    shared = None if whole.shared is None else replace(whole.shared, numbers_M=whole.shared.numbers_M[own])
    return replace(
        whole,
        shared=shared,
        context=context,
        tokens=whole.tokens.ravel()[kept].reshape(len(whole.tokens), -1),
        sources=whole.sources.ravel()[kept].reshape(len(whole.tokens), -1),
        rows_M=place[whole.rows_M[own]],
        targets_M=whole.targets_M[own],
        columns_M=whole.columns_M[own],
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def with_mtp(batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
    """Add the MTP inputs to a micro-batch, or to a context-parallel rank's part of one."""
    known, last = micro_batch.sources >= 0, len(batch.tokens_N) - 1
    column = np.where(known, micro_batch.sources, 0)
    sample = np.searchsorted(batch.starts_B, column, side="right") - 1
    after_next = np.minimum(column + 2, last)
    inside = known & (column + 2 < batch.starts_B[sample] + batch.lengths_B[sample])
    rows_F = np.flatnonzero(inside & (batch.loss_mask_N[after_next] != 0))
    mtp = MtpInputs(
        tokens=np.where(known, batch.tokens_N[np.minimum(column + 1, last)], 0).astype(np.int64),
        rows_F=rows_F,
        targets_F=batch.tokens_N[after_next.ravel()[rows_F]].astype(np.int64),
    )
    return replace(micro_batch, mtp=mtp)


def num_mtp_tokens(batch: TrainBatch, samples: Ints) -> int:
    """Count the tokens that `with_mtp` predicts: trained tokens with two tokens before them."""
    place_N = np.arange(len(batch.tokens_N)) - np.repeat(batch.starts_B, batch.lengths_B)
    counted_N = (batch.loss_mask_N != 0) & (place_N >= 2)
    return int(np.add.reduceat(counted_N.astype(np.int64), batch.starts_B)[samples].sum())
