"""Samples and their segments, with defaults for what a test does not name."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messages import (
    Float32Array,
    Int32Array,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
)

Ids = Sequence[int] | NDArray[Any]


def filled(fields: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Fields of a message, with defaults for those that are not given."""
    return {**defaults, **fields}


def segment(
    response: Ids = (7, 8),
    *,
    prompt: Ids = (5,),
    key: SampleKey | None = None,
    log_probs: Sequence[float] | NDArray[Any] | None = None,
    mask: Sequence[int] | NDArray[Any] | None = None,
    spans: Sequence[tuple[int, int, int]] | None = None,
) -> Segment:
    """Tokens of one sample that one request generated.

    Args:
        response: its token ids.
        prompt: the token ids before them.
        key: the sample; none: the first one of group 0.
        log_probs: a number per response token; none: -1 each.
        mask: 1 per response token that trains; none: all.
        spans: (weight version, start, end) in the response; none: all of it by version 1.
    """
    length = len(response)
    spans = ((1, 0, length),) if spans is None else spans
    return Segment(
        sample=SampleKey(group_id=0, attempt=0, index=0) if key is None else key,
        prompt_ids=Int32Array(prompt),
        response_ids=Int32Array(response),
        loss_mask=UInt8Array(np.ones(length) if mask is None else mask),
        rollout_log_probs=Float32Array(np.full(length, -1.0) if log_probs is None else log_probs),
        weight_spans=tuple(WeightSpan(version=version, start=start, end=end) for version, start, end in spans),
    )


def payload(group_id: int, *segments: Segment, attempt: int = 0, lease: str = "lease") -> SegmentsPublished:
    """The message that holds segments of a group."""
    return SegmentsPublished(group_id=group_id, attempt=attempt, lease=lease, segments=segments)


def summary(index: int = 0, *refs: tuple[int, int], reward: float | None = 1.0, **fields: Any) -> SampleSummary:
    """A sample of a completed group.

    Args:
        index: of the sample in its group.
        refs: (sequence of the payload, position in it) of each segment.
        reward: its score; none: not scored.
        fields: others of the message.
    """
    segments = tuple(SegmentRef(seq=seq, position=position) for seq, position in refs)
    return SampleSummary(**filled(fields, status=SampleStatus.COMPLETED), index=index, segments=segments, reward=reward)
