"""Validates /generate responses against their requests. Pure."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from actors.rollout.sglang.answers import MetaInfo, VersionSpan, status_of
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


class NewTokens(NamedTuple):
    """The new tokens of an answer or chunk, as the engine sent them."""

    ids: list[int]  # [T]
    named: list[int]  # ids that come with the log-probs
    log_probs: list[float | None]  # None: SGLang encodes NaN as null
    masks: list[list[int]] = []  # with return_sampling_mask: ids that top-p and top-k kept
    kept_log_probs: list[float | None] = []  # and log-probs among them


ANYTHING: Final = ExpectedAnswer()


def meta_problem(meta: MetaInfo, expected: ExpectedAnswer) -> str | None:
    """Return why an answer belongs to another request."""
    if expected.rid and meta.id != expected.rid:
        return f"it answers request {(meta.id or 'null')[:MAX_SHOWN]}, but {expected.rid} was sent"
    if None not in (expected.prompt_tokens, meta.prompt_tokens) and meta.prompt_tokens != expected.prompt_tokens:
        return f"prompt_tokens is {meta.prompt_tokens}, but {expected.prompt_tokens} were sent"
    return None


def tokens_problem(tokens: NewTokens, expected: ExpectedAnswer) -> str | None:
    """Return what is wrong with the new tokens of an answer or chunk, or with their log-probs."""
    if tokens.named != tokens.ids:
        return f"the log-probs are of other tokens: {_difference(tokens.named, tokens.ids)}"
    problem = id_problem(tokens.ids, expected.vocab_size) or log_prob_problem(tokens.log_probs)
    if problem is None and expected.max_kept is not None:
        problem = _masks_problem(tokens, expected.max_kept, expected.vocab_size)
    return problem


def _masks_problem(tokens: NewTokens, max_kept: int, vocab_size: int | None) -> str | None:
    """Return what is wrong with the kept tokens, or with the log-probs among them."""
    ids, masks, log_probs = tokens.ids, tokens.masks, tokens.kept_log_probs
    if len(masks) != len(ids) or len(log_probs) != len(ids):
        return (
            f"return_sampling_mask was sent, but {len(masks)} sampling masks and {len(log_probs)} log-probs came for "
            f"{len(ids)} tokens: rollout.return_sampling_mask needs SGLang 0.5.23 or newer"
        )
    longest = max(map(len, masks), default=0)
    if longest > max_kept:
        return f"a sampling mask has {longest} tokens; top_k allows {max_kept}"
    if [] in masks:
        place = masks.index([])
        return f"token {place} has id {ids[place]}, and no kept tokens"
    counts, kept = np.array([*map(len, masks)], dtype=np.int64), list(chain.from_iterable(masks))
    return kept_problem(ids, counts, kept, vocab_size) or log_prob_problem(log_probs)


def count_problem(num_tokens: int, expected: ExpectedAnswer) -> str | None:
    """Return a problem if there are more tokens than requested."""
    if expected.max_new_tokens is not None and num_tokens > expected.max_new_tokens:
        return f"received {num_tokens} tokens; the request allows {expected.max_new_tokens}"
    return None


def end_problem(meta: MetaInfo, num_tokens: int, last_id: int | None) -> str | None:
    """Return what is wrong with the end of an answer, or with its weight labels.

    Args:
        meta: of the whole answer, or of the last chunk of a stream.
        num_tokens: of the whole answer.
        last_id: its last token; None: unknown.
    """
    try:
        status = status_of(meta.finish_reason)
    except ValueError as error:
        return str(error)
    if num_tokens == 0:
        aborted = status is SampleStatus.ABORTED
        return None if aborted else f"received no token, and it ended with {meta.finish_reason}"
    matched = (meta.finish_reason or {}).get("matched")
    if isinstance(matched, int) and last_id is not None and last_id != matched:
        return f"it stopped at token {matched}, but its last token is {last_id}"
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
