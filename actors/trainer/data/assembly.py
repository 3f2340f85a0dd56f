"""Assembly of completed prompt groups and their payloads into a batch of ragged columns."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.batch import NOT_KNOWN, ExpertIds, LeftOut, TrainBatch, expert_ids
from actors.trainer.data.columns import Columns, column_problem, of_all_tokens, topk_of_all_tokens
from actors.trainer.data.skipped import SamplePlace
from actors.trainer.data.staleness import NOT_SAMPLED, Masking, joined, loss_mask_of, staleness_of
from messages import (
    ColumnPublished,
    GroupCompleted,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentsPublished,
    with_untrained,
)
from runtime.data.tokens import are_possible, sample_problem
from runtime.settings.topology import TEACHER_LOG_PROBS, TOKEN_REWARDS


@dataclass(frozen=True)
class CollectedGroup:
    """A prompt group with everything that training needs of it."""

    completed: GroupCompleted
    payloads: Mapping[int, SegmentsPublished]  # by sequence in the data stream
    too_long: frozenset[SamplePlace] = frozenset()  # samples over the length limit; their payloads are not fetched
    problems: Mapping[SamplePlace, str] = field(default_factory=dict[SamplePlace, str])  # invalid samples with reasons
    columns: Columns = field(default_factory=dict[int, ColumnPublished])

    def left_out(self, sample: SampleSummary) -> LeftOut:
        """Whether the tokens of a sample are left out, and why."""
        place = sample.index, sample.part
        if place in self.too_long:
            return LeftOut.TOO_LONG
        return LeftOut.INVALID if place in self.problems else LeftOut.NO


def payload_seqs(completed: GroupCompleted, too_long: Collection[SamplePlace] = ()) -> list[int]:
    """Data stream sequences of a group's segments, without duplicates and without samples that are too long."""
    wanted = (sample for sample in completed.samples if (sample.index, sample.part) not in too_long)
    return sorted({ref.seq for sample in wanted for ref in sample.segments})


def trainable(sample: SampleSummary) -> bool:
    """Whether a sample enters the batch: it has tokens and a reward, and did not fail."""
    return sample.reward is not None and bool(sample.segments) and sample.status is not SampleStatus.FAILED


NO_MASKING = Masking()
_Number = TypeVar("_Number", bound=np.number[Any])


def assemble(
    step: int,
    groups: Sequence[CollectedGroup],
    steps_of_versions: Mapping[int, int],
    masking: Masking = NO_MASKING,
    reward_keys: Sequence[str] = (),
    column_names: Sequence[str] = (),
    topk: int = 0,
) -> TrainBatch | None:
    """Concatenate the samples of a train step.

    Args:
        step: Number of the train step; the weights that it starts from contain that many train steps.
        groups: Groups in order of issue.
        steps_of_versions: Train steps that each published weight version contains.
        masking: Masks tokens by the weights that sampled them.
        reward_keys: Names of the rewards that the recipe trains, if there are several.
        column_names: Names of the columns that engine pools computed.
        topk: Number of likeliest tokens at each place of a teacher's column. 0: none are trained.

    Returns:
        The batch, or None when no sample can be trained.

    Raises:
        ValueError: A payload holds another sample than the event names, and the sample is not marked invalid.
    """
    builder = _Builder(step, steps_of_versions, masking, reward_keys, column_names, topk)
    for group in groups:
        builder.baseline = group.completed.baseline
        rollouts: dict[int, int] = {}
        for sample in sorted(group.completed.samples, key=lambda sample: (sample.index, sample.part)):
            if trainable(sample):
                rollout = rollouts.setdefault(sample.index, builder.num_rollouts + len(rollouts))
                left_out = group.left_out(sample)
                segments = [] if left_out else list(segments_of(group.completed, group.payloads, sample))
                builder.add(group.completed.group_id, rollout, sample, segments, left_out)
                builder.add_columns(sample, segments, group.columns)
        builder.num_rollouts += len(rollouts)
    return builder.build()


def segments_of(
    completed: GroupCompleted, payloads: Mapping[int, SegmentsPublished], sample: SampleSummary
) -> Iterator[Segment]:
    """Yield the segments of a sample in order, with what its summary excludes from the loss.

    Raises:
        ValueError: A reference points to another sample's segment, or to none.
    """
    return with_untrained(_stored_segments(completed, payloads, sample), sample.untrained)


def _stored_segments(
    completed: GroupCompleted, payloads: Mapping[int, SegmentsPublished], sample: SampleSummary
) -> Iterator[Segment]:
    for ref in sample.segments:
        segments = payloads[ref.seq].segments
        if not 0 <= ref.position < len(segments):
            raise ValueError(f"message {ref.seq} has no segment {ref.position}")
        key = segments[ref.position].sample
        if (key.group_id, key.index, key.part) != (completed.group_id, sample.index, sample.part):
            raise ValueError(f"segment {ref.position} of message {ref.seq} belongs to {key}")
        yield segments[ref.position]


def problems_of(
    completed: GroupCompleted,
    payloads: Mapping[int, SegmentsPublished],
    vocab_size: int | None,
    too_long: Collection[SamplePlace] = (),
    reward_keys: Sequence[str] = (),
    *,
    needs_kept: bool = False,
    columns: Columns | None = None,
    column_names: Sequence[str] = (),
    topk: int = 0,
) -> dict[SamplePlace, str]:
    """Find the invalid samples of a group and describe the problem of each.

    Args:
        completed: The group.
        payloads: Payloads by sequence in the data stream.
        vocab_size: Vocabulary size of the model. None: unknown.
        too_long: Samples whose payloads are not fetched.
        reward_keys: Names of the rewards that each sample must have.
        needs_kept: Whether trained tokens need the tokens that top-p and top-k kept.
        columns: Columns by sequence in the data stream.
        column_names: Names of the columns that each sample must have.
        topk: Number of likeliest tokens that a teacher's column must have at each place.
    """
    problems: dict[SamplePlace, str] = {}
    possible = are_possible([segment for stored in payloads.values() for segment in stored.segments], vocab_size)
    for sample in completed.samples:
        place = sample.index, sample.part
        if place in too_long or not trainable(sample):
            continue
        try:
            segments = list(segments_of(completed, payloads, sample))
        except ValueError as error:
            problems[place] = str(error)
            continue
        num_tokens = sample.prompt_len + sample.response_len or None
        problem = sample_problem(
            segments, vocab_size, num_tokens=num_tokens, needs_kept=needs_kept, possible=possible
        ) or column_problem(completed, sample, segments, columns or {}, column_names, topk=topk, vocab_size=vocab_size)
        if problem is not None:
            problems[place] = problem
        elif missing := [key for key in reward_keys if key not in sample.rewards]:
            problems[place] = f"it has no reward named {', '.join(missing)}, only {', '.join(sample.rewards) or 'none'}"
    return problems


def num_turns(sample: SampleSummary, segments: Sequence[Segment]) -> int:
    """Count a sample's turns: segments with an input of their own. Without segments, those that its metadata names."""
    named = sample.metadata.get("num_turns", 1)
    turns = sum(len(segment.prompt_ids) > 0 for segment in segments) or (named if isinstance(named, int) else 1)
    return max(turns, 1)


def raw_reward(sample: SampleSummary) -> float:
    """Return a sample's reward before its grader shaped it, if its metadata has one; else its reward."""
    assert sample.reward is not None
    raw = sample.metadata.get("raw_reward", sample.reward)
    return float(raw) if isinstance(raw, (int, float)) else sample.reward


class _Builder:
    def __init__(
        self,
        step: int,
        steps_of_versions: Mapping[int, int],
        masking: Masking,
        reward_keys: Sequence[str],
        column_names: Sequence[str],
        topk: int,
    ) -> None:
        self.num_rollouts = 0
        self.baseline: SampleSummary | None = None  # of the group whose samples are added
        self._reward_keys = reward_keys
        self._named: list[list[float]] = []
        self._baselines: list[tuple[float, int]] = []  # reward and length by sample
        self._sizes: list[tuple[int, int, int, int]] = []  # response, output, input and turns by sample
        self._step = step
        self._steps_of_versions = steps_of_versions
        self._masking = masking
        self._samples: list[tuple[int, int, int, int, float, float, bool, LeftOut, int]] = []  # in the order of `build`
        self._tokens: list[NDArray[np.int32]] = []
        self._segments: list[list[Segment]] = []  # by sample
        self._spans: list[int] = []  # tokens that are input, then tokens of a response, in turns
        self._experts: list[
            tuple[int, NDArray[np.int32] | None]
        ] = []  # token count, and the experts of each token if they are recorded
        self._kept_ids: list[NDArray[np.int32]] = []
        self._columns: dict[str, list[NDArray[np.float32]]] = {name: [] for name in column_names}
        self._width = topk
        self._topk: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []  # ids and log-probs

    def add(
        self, group: int, rollout: int, sample: SampleSummary, segments: Sequence[Segment], left_out: LeftOut
    ) -> None:
        length = 0 if segments else self._add_nothing()
        self._segments.append(list(segments))
        for segment in segments:
            num_prompt, num_response = len(segment.prompt_ids), len(segment.response_ids)
            length += num_prompt + num_response
            self._tokens += [segment.prompt_ids, segment.response_ids]
            self._spans += [num_prompt, num_response]
            self._experts.append((num_prompt + num_response, segment.routed_experts))
            self._kept_ids += [] if segment.kept_ids is None else [segment.kept_ids]
        truncated = sample.status is SampleStatus.TRUNCATED
        assert sample.reward is not None
        names = group, rollout, sample.index, sample.part
        self._samples.append((*names, sample.reward, raw_reward(sample), truncated, left_out, length))
        self._named.append([sample.rewards.get(key, np.nan) for key in self._reward_keys])
        known = None if self.baseline is None else self.baseline.reward
        self._baselines.append((np.nan if known is None else known, self.baseline.response_len if self.baseline else 0))
        output, given = sample.response_len, sample.prompt_len
        if segments:
            output = sum(len(segment.response_ids) for segment in segments)
            given = sum(len(segment.prompt_ids) for segment in segments)
        response = sample.response_len or output
        self._sizes.append((response, output, given, num_turns(sample, segments)))

    def add_columns(self, sample: SampleSummary, segments: Sequence[Segment], columns: Columns) -> None:
        """Add the columns of the sample that was added last."""
        for name, parts in self._columns.items():
            parts.append(of_all_tokens(columns.get(sample.columns.get(name, 0)), segments))
        if self._width:
            column = columns.get(sample.columns.get(TEACHER_LOG_PROBS, 0))
            self._topk.append(topk_of_all_tokens(column, segments, self._width))

    def _add_nothing(self) -> int:
        """Add one token without loss for a sample that is left out, so that its rollout counts."""
        self._tokens.append(np.zeros(1, dtype=np.int32))
        self._spans += [1, 0]
        self._experts.append((1, None))
        return 1

    def build(self) -> TrainBatch | None:
        if not self._samples:
            return None
        groups, rollouts, indices, parts, rewards, raw_rewards, truncated, left_out, lengths = zip(
            *self._samples, strict=True
        )
        segments = [segment for some in self._segments for segment in some]
        staleness_R = staleness_of(segments, self._step, self._steps_of_versions)
        mask = self._of_all_tokens(loss_mask_of(self._segments, staleness_R, self._masking))
        log_probs_N = self._of_all_tokens(joined([segment.rollout_log_probs for segment in segments], np.float32))
        log_probs_N *= mask
        baselines, baseline_lens = zip(*self._baselines, strict=True)
        response_lens, output_lens, input_lens, turns = zip(*self._sizes, strict=True)
        return TrainBatch(
            step=self._step,
            groups_B=np.array(groups, dtype=np.int64),
            rollouts_B=np.array(rollouts, dtype=np.int64),
            indices_B=np.array(indices, dtype=np.int64),
            parts_B=np.array(parts, dtype=np.int64),
            rewards_B=np.array(rewards, dtype=np.float64),
            raw_rewards_B=np.array(raw_rewards, dtype=np.float64),
            truncated_B=np.array(truncated, dtype=np.uint8),
            left_out_B=np.array(left_out, dtype=np.uint8),
            lengths_B=np.array(lengths, dtype=np.int64),
            tokens_N=np.concatenate(self._tokens).astype(np.int32, copy=False),
            loss_mask_N=mask,
            rollout_log_probs_N=log_probs_N,
            staleness_N=self._of_all_tokens(staleness_R, NOT_SAMPLED),
            named_rewards_B=np.array(self._named, dtype=np.float64) if self._reward_keys else None,
            baseline_rewards_B=np.array(baselines, dtype=np.float64),
            baseline_lens_B=np.array(baseline_lens, dtype=np.int64),
            response_lens_B=np.array(response_lens, dtype=np.int64),
            output_lens_B=np.array(output_lens, dtype=np.int64),
            input_lens_B=np.array(input_lens, dtype=np.int64),
            num_turns_B=np.array(turns, dtype=np.int64),
            routed_experts_N=self._routed_experts(),
            kept_counts_N=self._of_all_tokens(np.concatenate([_kept_counts(segment) for segment in segments]))
            if self._kept_ids
            else None,
            kept_ids_K=np.concatenate(self._kept_ids) if self._kept_ids else None,
            temperatures_N=self._temperatures(segments),
            **{
                f"{name}_N": np.concatenate(parts) * (1 if name == TOKEN_REWARDS else mask)
                for name, parts in self._columns.items()
            },
            teacher_topk_ids_N=np.concatenate([ids for ids, _ in self._topk]) if self._topk else None,
            teacher_topk_log_probs_N=np.concatenate([found for _, found in self._topk]) if self._topk else None,
        )

    def _of_all_tokens(self, values_R: NDArray[_Number], others: int = 0) -> NDArray[_Number]:
        """Spread values of the R response tokens over all N tokens; `others` where a token is input."""
        is_response_N = np.repeat(np.tile([False, True], len(self._spans) // 2), self._spans)
        values_N = np.full(len(is_response_N), others, dtype=values_R.dtype)
        values_N[is_response_N] = values_R
        return values_N

    def _temperatures(self, segments: Sequence[Segment]) -> NDArray[np.float32] | None:
        """Return the temperatures of all tokens, if a turn has one of its own; 0: the recipe's."""
        if all(segment.temperature is None for segment in segments):
            return None
        temperatures = np.array([segment.temperature or 0.0 for segment in segments], dtype=np.float32)
        return self._of_all_tokens(np.repeat(temperatures, [len(segment.response_ids) for segment in segments]))

    def _routed_experts(self) -> ExpertIds | None:
        """Return the routed experts of all tokens, if any sample has some.

        Raises:
            ValueError: The number of experts per token differs, or an expert number is out of range.
        """
        known = [routed.reshape(num_tokens, -1) for num_tokens, routed in self._experts if routed is not None]
        if not known:
            return None
        widths = {routed.shape[1] for routed in known}
        if len(widths) > 1:
            raise ValueError(
                f"step {self._step + 1}: tokens have {sorted(widths)} routed experts; "
                "all tokens of a model have the same number"
            )
        (width,) = widths
        lowest, highest = min(int(routed.min()) for routed in known), max(int(routed.max()) for routed in known)
        if lowest < NOT_KNOWN or highest > np.iinfo(np.int16).max:
            raise ValueError(
                f"step {self._step + 1}: routed experts are numbered {lowest} to {highest}, beyond an int16"
            )
        return np.concatenate(
            [
                expert_ids(
                    np.full((num_tokens, width), NOT_KNOWN) if routed is None else routed.reshape(num_tokens, -1),
                    highest,
                )
                for num_tokens, routed in self._experts
            ]
        )


def _kept_counts(segment: Segment) -> NDArray[np.int32]:
    if segment.kept_counts is None:
        return np.zeros(len(segment.response_ids), dtype=np.int32)
    return np.asarray(segment.kept_counts)
