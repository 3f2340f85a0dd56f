"""Parses /generate responses and packs them into segments. Pure."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from actors.rollout.sglang.labels import version_of
from messages import EngineNumbers, Float32Array, Int32Array, SampleKey, SampleStatus, Segment, UInt8Array, WeightSpan

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class VersionSpan(msgspec.Struct, frozen=True):
    """Half-open span of output tokens and the label of the weights that sampled them, as SGLang reports it."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """The used part of meta_info. A request aborted in the waiting queue lacks most keys."""

    id: str | None = None  # request id
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []  # null: SGLang encodes NaN as null
    # With return_sampling_mask: per token the ids that top-p and top-k kept, and the log-prob among them.
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[float | None] = []
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count = 0
    num_retractions: Count = 0
    queue_time: float | None = None  # in seconds; only with --enable-metrics
    spec_num_proposed_drafts: Count = 0
    spec_num_correct_drafts: Count = 0
    spec_verify_ct: Count = 0


class Answer(msgspec.Struct, frozen=True):
    """The response to one finished request."""

    meta_info: MetaInfo
    text: str = ""
    output_ids: list[int] = []


NOTHING = Answer(meta_info=MetaInfo())

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


def status_of(answer: Answer) -> SampleStatus:
    """Return how the request ended.

    Raises:
        ValueError: the finish reason is not stop, length or abort.
    """
    reason = (answer.meta_info.finish_reason or {}).get("type")
    if not isinstance(reason, str) or reason not in _STATUS:
        raise ValueError(f"finish reason {reason!r}: expected stop, length or abort")
    return _STATUS[reason]


def oldest_version(answer: Answer) -> int | None:
    """Return the oldest weight version that sampled a token; 0 for unpublished weights, None without tokens."""
    return min((version_of(label) for label in labels_of(answer)), default=None)


def labels_of(answer: Answer) -> list[str]:
    """Return the weight labels that sampled the tokens; empty without tokens, [""] if the engine reports none."""
    if not answer.output_ids:
        return []
    meta = answer.meta_info
    return [span.version for span in meta.weight_versions or [] if span.end > span.start] or [meta.weight_version or ""]


def is_aborted(answer: Answer) -> bool:
    """Whether the request was aborted."""
    return (answer.meta_info.finish_reason or {}).get("type") == "abort"


def cut(answer: Answer, num_tokens: int, num_characters: int) -> Answer:
    """Return an answer without its first tokens and characters."""
    if not num_tokens and not num_characters:
        return answer
    meta = answer.meta_info
    spans = [
        VersionSpan(span.version, max(0, span.start - num_tokens), span.end - num_tokens)
        for span in meta.weight_versions or []
        if span.end > num_tokens
    ]
    rest = msgspec.structs.replace(
        meta,
        weight_versions=spans,
        output_token_logprobs=meta.output_token_logprobs[num_tokens:],
        output_token_sampling_mask=meta.output_token_sampling_mask[num_tokens:],
        output_token_sampling_logprobs=meta.output_token_sampling_logprobs[num_tokens:],
    )
    return Answer(meta_info=rest, text=answer.text[num_characters:], output_ids=answer.output_ids[num_tokens:])


def numbers_of(answers: Sequence[Answer]) -> EngineNumbers:
    """Sum the engine's statistics over finished requests."""
    metas = [answer.meta_info for answer in answers if answer.meta_info.finish_reason is not None]
    waits = [meta.queue_time for meta in metas if meta.queue_time is not None]
    return EngineNumbers(
        num_requests=len(metas),
        prompt_tokens=sum(meta.prompt_tokens or 0 for meta in metas),
        cached_tokens=sum(meta.cached_tokens for meta in metas),
        num_retractions=sum(meta.num_retractions for meta in metas),
        num_timed=len(waits),
        queue_time_s=sum(waits),
        max_queue_time_s=max(waits, default=0.0),
        draft_tokens=sum(meta.spec_num_proposed_drafts for meta in metas),
        accepted_draft_tokens=sum(meta.spec_num_correct_drafts for meta in metas),
        verify_steps=sum(meta.spec_verify_ct for meta in metas),
        verified_tokens=sum(meta.completion_tokens or 0 for meta in metas if meta.spec_verify_ct),
    )


def segment_of(answer: Answer, sample: SampleKey, prompt_ids: Int32Array) -> Segment:
    """Pack an answer into a segment. With kept tokens, its log-probs are those among them.

    Args:
        answer: to one request.
        sample: key of its sample.
        prompt_ids: [P], new input of this segment.

    Raises:
        ValueError: log-probs and token ids do not match, or the version spans do not cover the tokens.
    """
    meta = answer.meta_info
    ids = [token for _, token, _ in meta.output_token_logprobs]
    if ids != answer.output_ids:
        raise ValueError(
            f"the engine returned {len(answer.output_ids)} tokens, and log-probs of {len(ids)} other tokens"
        )
    masks, log_probs = meta.output_token_sampling_mask, [log_prob for log_prob, _, _ in meta.output_token_logprobs]
    if masks:
        log_probs = meta.output_token_sampling_logprobs
        if len(masks) != len(ids) or len(log_probs) != len(ids):
            raise ValueError(f"the engine returned {len(masks)} sampling masks for {len(ids)} tokens")
    return Segment(
        sample=sample,
        prompt_ids=prompt_ids,
        response_ids=Int32Array(ids),
        loss_mask=UInt8Array(np.ones(len(ids), np.uint8)),
        rollout_log_probs=Float32Array(np.array(log_probs, float)),
        weight_spans=_spans(meta, len(ids)),
        text=answer.text,
        kept_counts=Int32Array([len(mask) for mask in masks]) if masks else None,
        kept_ids=Int32Array(list(chain.from_iterable(masks))) if masks else None,
    )


def _spans(meta: MetaInfo, num_tokens: int) -> tuple[WeightSpan, ...]:
    if num_tokens == 0:
        return ()
    if meta.weight_versions:
        return _joined([(version_of(span.version), span.start, span.end) for span in meta.weight_versions])
    if meta.weight_version is None:
        raise ValueError("the engine does not report which weights sampled the tokens")
    return (WeightSpan(version=version_of(meta.weight_version), start=0, end=num_tokens),)


def _joined(spans: Sequence[tuple[int, int, int]]) -> tuple[WeightSpan, ...]:
    """Merge adjacent label spans of the same weight version."""
    joined: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if joined and joined[-1][0] == version and joined[-1][2] == start:
            start = joined.pop()[1]
        if end > start:
            joined.append((version, start, end))
    return tuple(WeightSpan(version=version, start=start, end=end) for version, start, end in joined)
