"""What a sample is made of: keys, segments, weight spans, and the light summary that events carry."""

from enum import StrEnum
from typing import Any

import msgspec

from messages.arrays import Float32Array, Int32Array, UInt8Array


class SampleStatus(StrEnum):
    """How the generation of a sample stands."""

    PENDING = "pending"  # not begun
    COMPLETED = "completed"
    TRUNCATED = "truncated"  # ran into its token limit
    ABORTED = "aborted"  # halted; may be continued
    FAILED = "failed"


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Which weight version sampled the tokens [start, end) of a segment's response."""

    version: int
    start: int
    end: int


class SampleKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one sample: parts of one index are fan-out siblings and share one vote in every normalisation."""

    group_id: int
    attempt: int
    index: int
    part: int = 0


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stretch of one sample as the engine returned it: one per turn or per spill.

    Raises ValueError unless response_ids, loss_mask and rollout_log_probs share length T and the spans cover [0, T).
    """

    sample: SampleKey
    prompt_ids: Int32Array  # [P], new input of this segment: the prompt, a tool's answer, or nothing when continued
    response_ids: Int32Array  # [T]
    loss_mask: UInt8Array  # [T], 1 where the token trains
    rollout_log_probs: Float32Array  # [T], natural log, under the policy and temperature that sampled
    weight_spans: tuple[WeightSpan, ...]  # in order, without gaps, covering [0, T)
    text: str = ""  # response_ids as text
    routed_experts: Int32Array | None = None  # [(P + T) * E]: of each token that is read E of all layers; -1: not known

    def __post_init__(self) -> None:
        routed, num_tokens = self.routed_experts, len(self.prompt_ids) + len(self.response_ids)
        if routed is not None and (not num_tokens or len(routed) % num_tokens):
            raise ValueError(f"routed_experts has {len(routed)} numbers for {num_tokens} tokens")
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.rollout_log_probs)}
        if len(lengths) != 1:
            raise ValueError(f"response_ids, loss_mask, rollout_log_probs differ in length: {sorted(lengths)}")
        position = 0
        for span in self.weight_spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"weight span [{span.start}, {span.end}) does not follow token {position}")
            position = span.end
        if position != len(self.response_ids):
            raise ValueError(f"weight spans cover {position} of {len(self.response_ids)} tokens")


class SegmentRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a segment lies: the sequence number of its data message, and its position in there."""

    seq: int
    position: int


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What events say of a sample; its tokens are in the segments."""

    index: int
    part: int = 0
    status: SampleStatus
    segments: tuple[SegmentRef, ...] = ()  # in order, over all attempts that contributed
    prompt_len: int = 0  # tokens
    response_len: int = 0  # tokens, all segments
    reward: float | None = None  # None until scored
    score: dict[str, Any] | None = None  # what the grader answered, when that was more than a number
    first_version: int | None = None  # oldest and newest weight version among its tokens
    last_version: int | None = None
    reason: str | None = None  # why it failed
    metadata: dict[str, Any] = {}  # of this sample alone, as a generate function noted it


class EngineNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What engines say of the requests of one attempt, added up over them; those of an engine that died are missing."""

    num_requests: int = 0
    prompt_tokens: int = 0  # that were to be computed, a continued sample's earlier tokens among them
    cached_tokens: int = 0  # of those, found in the engine's prefix cache
    num_retractions: int = 0  # times that a request lost its keys and values, for want of memory or by a pause
    num_timed: int = 0  # requests of which the engine says how long they waited (SGLang with --enable-metrics alone)
    queue_time_s: float = 0.0  # of those, in the engine's queue
    max_queue_time_s: float = 0.0
    draft_tokens: int = 0  # proposed by speculative decoding
    accepted_draft_tokens: int = 0
    verify_steps: int = 0  # in which drafts were checked
    verified_tokens: int = 0  # output tokens of the requests with such steps

    def plus(self, other: "EngineNumbers") -> "EngineNumbers":
        """Of the requests of both."""
        if not self.num_requests:
            return other
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        sums["max_queue_time_s"] = max(self.max_queue_time_s, other.max_queue_time_s)
        return EngineNumbers(**sums)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, in SGLang's words."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
