"""Validates /generate responses against their requests. Pure."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from actors.rollout.sglang.answers import Answer, VersionSpan, status_of
from messages import SampleStatus
from runtime.data.tokens import id_problem, kept_problem, log_prob_problem

_LABEL: Final = re.compile(rb'"weight_version"\s*:\s*"([^"\\]{1,200})"')
MAX_SHOWN: Final = 80  # characters of an engine's output shown in messages


class ExpectedAnswer(NamedTuple):
    """The properties of a request that its answer must match."""

    rid: str = ""  # empty: unknown
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    max_kept: int | None = None  # with return_sampling_mask: most tokens that top-k keeps


ANYTHING: Final = ExpectedAnswer()


def answer_problem(answer: Answer, expected: ExpectedAnswer) -> str | None:
    """Return the first problem of a finished answer in its tokens, weight spans, end or request id."""
    meta, num_tokens = answer.meta_info, len(answer.output_ids)
    if meta.completion_tokens not in (None, num_tokens):
        return f"completion_tokens is {meta.completion_tokens}, but {num_tokens} tokens were received"
    return (
        meta_problem(answer, expected)
        or tokens_problem(answer, expected)
        or count_problem(num_tokens, expected)
        or end_problem(answer, num_tokens)
    )


def meta_problem(answer: Answer, expected: ExpectedAnswer) -> str | None:
    """Return why an answer belongs to another request."""
    meta = answer.meta_info
    if expected.rid and meta.id != expected.rid:
        return f"it answers request {(meta.id or 'null')[:MAX_SHOWN]}, but {expected.rid} was sent"
    if None not in (expected.prompt_tokens, meta.prompt_tokens) and meta.prompt_tokens != expected.prompt_tokens:
        return f"prompt_tokens is {meta.prompt_tokens}, but {expected.prompt_tokens} were sent"
    return None


def tokens_problem(answer: Answer, expected: ExpectedAnswer, num_before: int = 0) -> str | None:
    """Return what is wrong with the tokens and log-probs of an answer, or of a streamed chunk.

    Args:
        answer: or chunk.
        expected: the request's properties.
        num_before: tokens of earlier chunks; a chunk's log-probs may cover all tokens so far.
    """
    ids, triples = answer.output_ids, answer.meta_info.output_token_logprobs
    own = triples[num_before:] if len(triples) == num_before + len(ids) else triples
    named = [token for _, token, _ in own]
    if named != ids:
        return f"the log-probs are of other tokens: {_difference(named, ids)}"
    problem = id_problem(ids, expected.vocab_size) or log_prob_problem([value for value, _, _ in triples])
    if problem is None and expected.max_kept is not None:
        problem = _masks_problem(answer, expected, num_before)
    return problem


def _masks_problem(answer: Answer, expected: ExpectedAnswer, num_before: int) -> str | None:
    """Return what is wrong with the kept tokens of an answer or chunk, or with the log-probs among them."""
    ids, meta = answer.output_ids, answer.meta_info
    masks, log_probs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if len(masks) == len(log_probs) == num_before + len(ids):
        masks, log_probs = masks[num_before:], log_probs[num_before:]
    if len(masks) != len(ids) or len(log_probs) != len(ids):
        return (
            f"return_sampling_mask was sent, but {len(masks)} sampling masks and {len(log_probs)} log-probs came for "
            f"{len(ids)} tokens: rollout.return_sampling_mask needs SGLang 0.5.23 or newer"
        )
    longest = max(map(len, masks), default=0)
    if expected.max_kept is not None and longest > expected.max_kept:
        return f"a sampling mask has {longest} tokens; top_k allows {expected.max_kept}"
    if [] in masks:
        place = masks.index([])
        return f"token {place} has id {ids[place]}, and no kept tokens"
    counts, kept = np.array([*map(len, masks)], dtype=np.int64), list(chain.from_iterable(masks))
    return kept_problem(ids, counts, kept, expected.vocab_size) or log_prob_problem(log_probs)


def count_problem(num_tokens: int, expected: ExpectedAnswer) -> str | None:
    """Return a problem if there are more tokens than requested."""
    if expected.max_new_tokens is not None and num_tokens > expected.max_new_tokens:
        return f"received {num_tokens} tokens; the request allows {expected.max_new_tokens}"
    return None


def end_problem(answer: Answer, num_tokens: int) -> str | None:
    """Return what is wrong with the end of an answer, or with its weight labels.

    Args:
        answer: whole, or the last chunk of a stream.
        num_tokens: of the whole answer.
    """
    try:
        status = status_of(answer)
    except ValueError as error:
        return str(error)
    if num_tokens == 0:
        aborted = status is SampleStatus.ABORTED
        return None if aborted else f"received no token, and it ended with {answer.meta_info.finish_reason}"
    meta = answer.meta_info
    matched = (meta.finish_reason or {}).get("matched")
    if isinstance(matched, int) and answer.output_ids and answer.output_ids[-1] != matched:
        return f"it stopped at token {matched}, but its last token is {answer.output_ids[-1]}"
    if meta.weight_versions:
        return _spans_problem(meta.weight_versions, num_tokens)
    return None if meta.weight_version is not None else "it does not report which weights sampled the tokens"


def label_in(data: bytes) -> str:
    """Return the weight label in an unreadable answer, to identify its engine; empty if there is none."""
    found = _LABEL.search(data)
    return found[1].decode(errors="replace") if found else ""


def _spans_problem(spans: Sequence[VersionSpan], num_tokens: int) -> str | None:
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            return f"weight span [{span.start}, {span.end}) does not follow token {position}"
        position = span.end
    return None if position == num_tokens else f"weight spans cover {position} of {num_tokens} tokens"


def _difference(named: Sequence[int], ids: Sequence[int]) -> str:
    if len(named) != len(ids):
        return f"{len(named)} log-probs and {len(ids)} tokens"
    place = next(place for place, (first, second) in enumerate(zip(named, ids, strict=True)) if first != second)
    return f"token {place} is {ids[place]}, its log-prob is of {named[place]}"
