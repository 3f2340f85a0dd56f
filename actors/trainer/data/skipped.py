"""Samples that are skipped in training: too long, or masked because their loss is not finite; counted by reason.

Lengths are checked in events, before any payload is fetched.

B samples, N tokens of the batch. A masked sample trains as if its loss mask were all zeros. It enters no gradient and
no mean over tokens. Its rollout still counts in the denominator of means over rollouts. Its reward, if finite, still
counts in its group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import Ints, LeftOut, MicroBatch, MtpInputs, TrainBatch, only_where, with_mtp
from actors.trainer.data.prompts import shared_without
from messages import GroupCompleted, SampleSummary, UntrainedSamples
from runtime.process.actor import InputError
from runtime.settings.placement import sample_limit
from runtime.settings.topology import Topology

NOT_FINITE: Final = "not_finite"  # the sample's loss, or the gradient of its optimizer step, is not finite
WHY_LEFT_OUT: Final = {LeftOut.TOO_LONG: "too_long", LeftOut.INVALID: "invalid"}


Flags = NDArray[np.bool_]


SamplePlace = tuple[int, int]  # index and part of a sample in its group


@dataclass(frozen=True, kw_only=True)
class LengthLimit:
    """Longest allowed sample, and the action for a longer one."""

    max_tokens: int | None = None  # None: any length
    ends: bool = False  # True: a longer sample ends the run; False: it is masked

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """Read the limit from the topology."""
        return cls(max_tokens=sample_limit(topology), ends=topology.train.on_too_long == "fail")

    def too_long(self, completed: GroupCompleted) -> frozenset[SamplePlace]:
        """Return the samples of a group that exceed the limit."""
        if self.max_tokens is None:
            return frozenset()
        long = (sample for sample in completed.samples if length_of(sample) > self.max_tokens)
        return frozenset((sample.index, sample.part) for sample in long)

    def check(self, completed: GroupCompleted) -> None:
        """Raise InputError if a sample exceeds the limit and the setting ends the run."""
        if not self.ends:
            return
        for index, part in sorted(self.too_long(completed)):
            sample = next(sample for sample in completed.samples if (sample.index, sample.part) == (index, part))
            raise InputError(
                f"sample {index} of group {completed.group_id} has {length_of(sample)} tokens; {self.max_tokens} fit "
                "(train.max_tokens_per_gpu x trainer.megatron.context_parallel_size): raise it, lower "
                'rollout.max_response_len, or set train.on_too_long = "mask"'
            )


def length_of(sample: SampleSummary) -> int:
    """Tokens of prompt and response, as the events report them."""
    return sample.prompt_len + sample.response_len


def samples_with(batch: TrainBatch, flags_N: Flags) -> Flags:
    """Return which samples have a flagged token, [B]."""
    return np.logical_or.reduceat(flags_N, batch.starts_B)


def with_masked(batch: TrainBatch, masked_B: Flags) -> TrainBatch:
    """Return the batch with the loss mask of masked samples set to 0."""
    masked_N = np.repeat(masked_B, batch.lengths_B)
    return replace(batch, loss_mask_N=np.where(masked_N, 0, batch.loss_mask_N).astype(np.uint8))


def without(batch: TrainBatch, micro_batch: MicroBatch, masked_B: Flags) -> MicroBatch:
    """Replace masked samples of a micro-batch, or of a context-parallel rank's part of one, by padding.

    Their tokens are not inputs either: a gradient of 0 through a forward pass with NaN is NaN. All other tokens keep
    their positions, because the recorded experts of an earlier pass depend on them. A prompt stays for the samples that
    share it.
    """
    if micro_batch.shared is not None:
        return shared_without(batch, micro_batch, masked_B)
    masked_N = np.repeat(masked_B, batch.lengths_B)
    gone = (micro_batch.sources >= 0) & masked_N[micro_batch.sources]
    kept_M = ~masked_N[micro_batch.columns_M]
    columns_M = micro_batch.columns_M[kept_M]
    routed, mtp = micro_batch.routed_experts, micro_batch.mtp
    return replace(
        micro_batch,
        tokens=np.where(gone, 0, micro_batch.tokens),
        sources=np.where(gone, -1, micro_batch.sources),
        rows_M=micro_batch.rows_M[kept_M],
        targets_M=micro_batch.targets_M[kept_M],
        columns_M=columns_M,
        kept=batch.kept_of(columns_M),
        topk=batch.topk_of(columns_M),
        routed_experts=None if routed is None else only_where(~gone, routed),
        mtp=None if mtp is None else _mtp_without(mtp, gone),
    )


def with_mask(batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
    """Leave out of a micro-batch's trained tokens those that the batch's loss mask does not have any more.

    They stay inputs, and all tokens keep their positions.
    """
    kept_M = batch.loss_mask_N[micro_batch.columns_M] != 0
    columns_M, shared = micro_batch.columns_M[kept_M], micro_batch.shared
    masked = replace(
        micro_batch,
        shared=None if shared is None else replace(shared, numbers_M=shared.numbers_M[kept_M]),
        rows_M=micro_batch.rows_M[kept_M],
        targets_M=micro_batch.targets_M[kept_M],
        columns_M=columns_M,
        kept=batch.kept_of(columns_M),
        topk=batch.topk_of(columns_M),
    )
    return masked if micro_batch.mtp is None else with_mtp(batch, masked)


def _mtp_without(mtp: MtpInputs, gone: Flags) -> MtpInputs:
    kept_F = ~gone.ravel()[mtp.rows_F]
    return MtpInputs(np.where(gone, 0, mtp.tokens), mtp.rows_F[kept_F], mtp.targets_F[kept_F])


def names_of(batch: TrainBatch, samples: Ints) -> Sequence[str]:
    """Name samples for error messages: group, index and part."""
    places = zip(batch.groups_B[samples], batch.indices_B[samples], batch.parts_B[samples], strict=True)
    return [f"group {group}, sample {index}, part {part}" for group, index, part in places]


@dataclass(frozen=True)
class Gradients:
    """Samples of a batch with and without a gradient."""

    skipped_samples: tuple[UntrainedSamples, ...]  # skipped samples with their reasons
    skipped_groups: tuple[int, ...]  # groups without a trained sample
    num_samples: int  # trained samples
    num_tokens: int  # tokens of the trained samples


NO_GRADIENTS: Final = Gradients(skipped_samples=(), skipped_groups=(), num_samples=0, num_tokens=0)


def gradients_of(batch: TrainBatch, skipped: Ints) -> Gradients:
    """Separate the trained samples from the skipped ones.

    Args:
        batch: The batch as it was trained.
        skipped: Samples whose loss, or whose optimizer step's gradient, was not finite.
    """
    trained_B = np.ones(len(batch.lengths_B), dtype=bool)
    trained_B[skipped] = False
    reasons = dict.fromkeys(skipped.tolist(), NOT_FINITE)
    for why, reason in WHY_LEFT_OUT.items():
        left_out = np.flatnonzero(batch.left_out_B == why)
        trained_B[left_out] = False
        reasons |= dict.fromkeys(left_out.tolist(), reason)
    named: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for sample, reason in sorted(reasons.items()):
        place = int(batch.indices_B[sample]), int(batch.parts_B[sample])
        named.setdefault((int(batch.groups_B[sample]), reason), []).append(place)
    with_gradient = set(batch.groups_B[trained_B].tolist())
    without = [group for group in dict.fromkeys(batch.groups_B.tolist()) if group not in with_gradient]
    return Gradients(
        skipped_samples=tuple(
            UntrainedSamples(group_id=group, reason=reason, samples=tuple(samples))
            for (group, reason), samples in named.items()
        ),
        skipped_groups=tuple(without),
        num_samples=int(trained_B.sum()),
        num_tokens=int(batch.lengths_B[trained_B].sum()),
    )
