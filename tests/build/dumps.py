"""Groups as dumps hold them, with defaults for what a test does not name."""

from collections.abc import Sequence
from typing import Any

import msgspec

from messages import (
    GroupCompleted,
    Outcome,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
)
from runtime.data.dumps import DumpedGroup, Fate, group_of
from tests.build.samples import filled, segment


def dumped_group(
    group_id: int,
    rewards: Sequence[float | None] = (1.0, 0.0),
    *,
    texts: Sequence[str] | None = None,
    prompt: str = "say",
    label: Any = "hi",
    fate: Fate | None = None,
    **sample: Any,
) -> DumpedGroup:
    """A completed group whose i-th sample has i + 1 tokens after a prompt of one token.

    Args:
        group_id: of the group.
        rewards: of each sample.
        texts: response of each sample; none: a letter per token.
        prompt: its text.
        label: what its grader compares with.
        fate: its outcome; none: in the batch of step 0.
        sample: other fields of all samples.
    """
    texts = ["abcdefgh"[: place + 1] for place in range(len(rewards))] if texts is None else texts
    segments = tuple(
        _with_text(group_id, index, text, tuple(range(10, 11 + index))) for index, text in enumerate(texts)
    )
    payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=segments, prompt=prompt, label=label)
    samples = tuple(
        SampleSummary(
            **filled(sample, status=SampleStatus.COMPLETED, first_version=1, last_version=2),
            index=index,
            segments=(SegmentRef(seq=7, position=index),),
            prompt_len=1,
            response_len=index + 1,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    )
    event = GroupCompleted(
        group_id=group_id, attempt=0, lease="l", round=0, instance="r", data="d", samples=samples, metadata={}
    )
    return group_of(event, {7: payload}, fate or Fate(verdict=Outcome.KEEP, step=0))


def _with_text(group_id: int, index: int, text: str, ids: tuple[int, ...]) -> Segment:
    key = SampleKey(group_id=group_id, attempt=0, index=index)
    mask = [1] * (len(ids) - 1) + [0]
    return msgspec.structs.replace(segment(ids, key=key, log_probs=[-0.5] * len(ids), mask=mask), text=text)
