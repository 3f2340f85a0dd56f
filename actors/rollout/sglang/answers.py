"""What an engine answers to /generate, packed into segments where it enters the system. Pure."""

from typing import Any

import msgspec
import numpy as np

from messages import Float32Array, Int32Array, SampleKey, SampleStatus, Segment, UInt8Array, WeightSpan


class VersionSpan(msgspec.Struct, frozen=True):
    """Half-open span of output tokens and the version that sampled them, as SGLang reports it."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """The part of meta_info that is used. A request aborted in the waiting queue lacks most keys."""

    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []


class Answer(msgspec.Struct, frozen=True):
    """One finished request."""

    meta_info: MetaInfo
    text: str = ""
    output_ids: list[int] = []


NOTHING = Answer(meta_info=MetaInfo())

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


def status_of(answer: Answer) -> SampleStatus:
    """How the request ended.

    Raises:
        ValueError: a finish reason that is none of stop, length and abort.
    """
    reason = (answer.meta_info.finish_reason or {}).get("type")
    if reason not in _STATUS:
        raise ValueError(f"finish reason {reason!r}: expected stop, length or abort")
    return _STATUS[reason]


def oldest_version(answer: Answer) -> int | None:
    """Oldest weights that sampled a token of it: 0 for weights that nobody announced, None without tokens."""
    if not answer.output_ids:
        return None
    meta = answer.meta_info
    named = [span.version for span in meta.weight_versions or []] or [meta.weight_version or ""]
    return min(int(version) if version.isdecimal() else 0 for version in named)


def is_aborted(answer: Answer) -> bool:
    """Whether somebody ended the request before its end."""
    return (answer.meta_info.finish_reason or {}).get("type") == "abort"


def cut(answer: Answer, num_tokens: int, num_characters: int) -> Answer:
    """What an answer holds beyond its first tokens and their text."""
    if not num_tokens and not num_characters:
        return answer
    meta = answer.meta_info
    spans = [
        VersionSpan(span.version, max(0, span.start - num_tokens), span.end - num_tokens)
        for span in meta.weight_versions or []
        if span.end > num_tokens
    ]
    rest = msgspec.structs.replace(
        meta, weight_versions=spans, output_token_logprobs=meta.output_token_logprobs[num_tokens:]
    )
    return Answer(meta_info=rest, text=answer.text[num_characters:], output_ids=answer.output_ids[num_tokens:])


def segment_of(answer: Answer, sample: SampleKey, prompt_ids: Int32Array) -> Segment:
    """Pack an answer.

    Args:
        answer: of one request.
        sample: whose it is.
        prompt_ids: [P], new input of this segment.

    Raises:
        ValueError: log-probs and token ids do not belong together, or the versions do not cover the tokens.
    """
    meta = answer.meta_info
    ids = [token for _, token, _ in meta.output_token_logprobs]
    if ids != answer.output_ids:
        raise ValueError(f"the engine returned {len(answer.output_ids)} tokens with log-probs of {len(ids)} others")
    return Segment(
        sample=sample,
        prompt_ids=prompt_ids,
        response_ids=Int32Array(ids),
        loss_mask=UInt8Array(np.ones(len(ids), np.uint8)),
        rollout_log_probs=Float32Array([log_prob for log_prob, _, _ in meta.output_token_logprobs]),
        weight_spans=_spans(meta, len(ids)),
        text=answer.text,
    )


def _spans(meta: MetaInfo, num_tokens: int) -> tuple[WeightSpan, ...]:
    if num_tokens == 0:
        return ()
    if meta.weight_versions:
        return tuple(WeightSpan(version=int(s.version), start=s.start, end=s.end) for s in meta.weight_versions)
    if meta.weight_version is None:
        raise ValueError("the engine does not say which weights sampled the tokens")
    return (WeightSpan(version=int(meta.weight_version), start=0, end=num_tokens),)
