"""Parts of a sample: keys, segments, weight spans, and the small summary that events carry."""

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from messages.arrays import Float32Array, Int32Array, UInt8Array


class SampleStatus(StrEnum):
    """State of a sample's generation."""

    PENDING = "pending"  # not started
    COMPLETED = "completed"
    TRUNCATED = "truncated"  # reached its token limit
    ABORTED = "aborted"  # halted; may be continued
    FAILED = "failed"


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The weight version that sampled the tokens [start, end) of a segment's response."""

    version: int
    start: int
    end: int


class SampleKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies one sample. Parts of one index are fan-out siblings and share one vote in every normalisation."""

    group_id: int
    attempt: int
    index: int
    part: int = 0


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stretch of one sample as the engine returned it: one per turn or per spill.

    Raises:
        ValueError: response_ids, loss_mask and rollout_log_probs differ in length, the spans do not cover [0, T), or
            routed_experts or the kept tokens do not fit the number of tokens, or the temperature is negative or not
            finite.
    """

    sample: SampleKey
    prompt_ids: Int32Array  # [P], new input of this segment: the prompt, a tool's answer, or empty when continued
    response_ids: Int32Array  # [T]
    loss_mask: UInt8Array  # [T], 1 where the token is trained
    rollout_log_probs: Float32Array  # [T], natural log, under the policy and temperature that sampled
    weight_spans: tuple[WeightSpan, ...]  # in order, without gaps, covering [0, T)
    text: str = ""  # response_ids as text
    routed_experts: Int32Array | None = None  # [(P + T) * E]: E experts of all layers per input token; -1: unknown

    # Tokens that top-p and top-k kept; the log-probs are then those of the softmax over them. None: not recorded.
    kept_counts: Int32Array | None = None  # [T], number of kept tokens; 0: unknown, as for input of a tool
    kept_ids: Int32Array | None = None  # their ids, those of the first token first
    temperature: float | None = None  # that a generate function chose for its turn; 0: greedy. None: the recipe's

    def __post_init__(self) -> None:
        routed, num_tokens = self.routed_experts, len(self.prompt_ids) + len(self.response_ids)
        if routed is not None and (not num_tokens or len(routed) % num_tokens):
            raise ValueError(f"routed_experts has {len(routed)} numbers for {num_tokens} tokens")
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.rollout_log_probs)}
        if len(lengths) != 1:
            raise ValueError(f"response_ids, loss_mask, rollout_log_probs differ in length: {sorted(lengths)}")
        self._check_kept()
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature = {self.temperature!r}: expected a number of at least 0")
        position = 0
        for span in self.weight_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"weight span [{span.start}, {span.end}) does not follow token {position}")
            position = span.end
        if position != len(self.response_ids):
            raise ValueError(f"weight spans cover {position} of {len(self.response_ids)} tokens")

    def _check_kept(self) -> None:
        counts, num_ids = self.kept_counts, 0 if self.kept_ids is None else len(self.kept_ids)
        if counts is None:
            if num_ids:
                raise ValueError(f"kept_ids has {num_ids} ids without kept_counts")
            return
        if len(counts) != len(self.response_ids):
            raise ValueError(f"kept_counts has {len(counts)} numbers for {len(self.response_ids)} response tokens")
        total = int(counts.sum(dtype=np.int64))
        if total != num_ids or (counts < 0).any():
            raise ValueError(f"kept_counts adds up to {total}, and kept_ids has {num_ids} ids")


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a segment is stored: sequence number of its data message, and position in that message."""

    seq: int
    position: int


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Summary of a sample in events, without fields that have their defaults. The segments hold its tokens."""

    index: int
    part: int = 0
    status: SampleStatus
    segments: tuple[SegmentRef, ...] = ()  # in order, over all attempts that contributed
    prompt_len: int = 0  # tokens
    response_len: int = 0  # tokens, all segments
    reward: float | None = None  # None until scored
    score: dict[str, Any] | None = None  # the grader's answer, if it was more than a number
    rewards: dict[str, float] = {}  # the grader's rewards by name, if the recipe trains several
    is_baseline: bool = False  # whether it is the greedy sample of its group, which is scored and not trained
    first_version: int | None = None  # oldest and newest version of the run's weights among its tokens
    last_version: int | None = None
    reason: str | None = None  # why it failed
    metadata: dict[str, Any] = {}  # of this sample alone, set by a generate function
    columns: dict[str, int] = {}  # sequence numbers of its data messages ColumnPublished, by column
    # Ranges [start, end) of its tokens after its first prompt, input between turns included, that do not train. They
    # are in addition to the loss masks of its segments, and set by a generate function.
    untrained: tuple[tuple[int, int], ...] = ()
    own_reward: bool = False  # whether a generate function set its reward, and no grader
    signs: tuple[str, ...] = ()  # of garbled output in a completed group: repetition, script, bytes


def with_untrained(segments: Iterable[Segment], untrained: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """Yield a sample's segments with the loss masks that its summary asks for.

    Args:
        segments: of one sample, in order.
        untrained: of its summary.
    """
    first, begun = 0, False
    for segment in segments:
        first += len(segment.prompt_ids) if begun else 0
        begun = True
        end = first + len(segment.response_ids)
        inside = [(max(start, first), min(stop, end)) for start, stop in untrained if start < end and stop > first]
        if inside:
            mask = np.array(segment.loss_mask, np.uint8)
            for start, stop in inside:
                mask[start - first : stop - first] = 0
            segment = msgspec.structs.replace(segment, loss_mask=UInt8Array(mask))
        yield segment
        first = end


class EngineNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engine statistics summed over the requests of one attempt. Statistics of a crashed engine are missing."""

    num_requests: int = 0
    prompt_tokens: int = 0  # to be computed, including the earlier tokens of a continued sample
    cached_tokens: int = 0  # prompt tokens found in the engine's prefix cache
    num_retractions: int = 0  # times that a request lost its KV cache, by lack of memory or by a pause
    num_timed: int = 0  # requests with a reported queue time (SGLang with --enable-metrics only)
    queue_time_s: float = 0.0  # of the num_timed requests, in the engine's queue
    max_queue_time_s: float = 0.0
    draft_tokens: int = 0  # proposed by speculative decoding
    accepted_draft_tokens: int = 0
    verify_steps: int = 0  # steps that verified drafts
    verified_tokens: int = 0  # output tokens of the requests with verify steps

    def plus(self, other: "EngineNumbers") -> "EngineNumbers":
        """Sum over the requests of both."""
        if not self.num_requests:
            return other
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        sums["max_queue_time_s"] = max(self.max_queue_time_s, other.max_queue_time_s)
        return EngineNumbers(**sums)


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of an engine: samples from one rollout actor, and what it reported last of the requests of all clients."""

    samples: int = 0  # in flight from the rollout actor that writes this
    running: int = 0  # requests
    waiting: int = 0  # requests in its queue
    cache_usage: float = 0.0  # share of its KV cache that requests hold


class LastSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sample of an attempt that had its last token after all others: what the attempt waited for."""

    queue_time_s: float = 0.0  # from the start of the attempt until it had a slot for generation
    engine: str = ""  # that answered its last request; empty: unknown, as behind a router
    grader: str = ""  # of the attempt's samples
    load: EngineLoad | None = None  # of that engine, once the attempt had all tokens; None: unknown


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters, with SGLang's names."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    return_sampling_mask: bool = False  # the answer has the tokens that top-p and top-k kept
