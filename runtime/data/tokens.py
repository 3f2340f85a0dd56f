"""Validates the token ids and log-probs of samples, wherever they enter the run. Pure."""

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from messages import Segment

MAX_LOG_PROB: Final = 1e-3  # rounding may exceed 0
GREEDY: Final = 1e-6  # below this temperature SGLang takes the likeliest token
MIN_LOG_PROB: Final = -1000.0  # float64 has no probability below e^-745, so no sampler draws such a token


def id_problem(ids: Sequence[int] | NDArray[Any], vocab_size: int | None) -> str | None:
    """Describe the first id that is not a token of the model; None if all are.

    Args:
        ids: integers of any size.
        vocab_size: vocabulary size of the model; none: unknown, so only negative ids are found.
    """
    if isinstance(ids, list) and (not ids or (min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size))):
        return None  # the usual case; takes a fifth of the time
    try:
        values = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        values = np.asarray(ids, dtype=object)
    wrong = values < 0 if vocab_size is None else (values < 0) | (values >= vocab_size)
    if not wrong.any():
        return None
    place = int(wrong.argmax())
    allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
    return f"token {place} has id {ids[place]} (allowed: {allowed})"


def log_prob_problem(log_probs: Sequence[float | None] | NDArray[Any]) -> str | None:
    """Describe the first log-prob that is impossible for a sampled token, None included; None if there is none."""
    if isinstance(log_probs, list) and None not in log_probs:
        numbers = cast("list[float]", log_probs)
        in_range = not numbers or (min(numbers) >= MIN_LOG_PROB and max(numbers) <= MAX_LOG_PROB)
        if in_range and math.isfinite(sum(numbers)):  # min and max may miss NaN, a sum does not
            return None
    values = np.asarray(log_probs, dtype=np.float64)
    right = (values >= MIN_LOG_PROB) & (values <= MAX_LOG_PROB)
    if right.all():
        return None
    place = int(right.argmin())
    value = log_probs[place]
    shown = "null" if value is None else f"{value:g}"
    return f"token {place} has log-prob {shown} (allowed: {MIN_LOG_PROB:g} to {MAX_LOG_PROB:g})"


def given_log_prob_problem(log_probs: Sequence[float | None] | NDArray[Any]) -> str | None:
    """Describe the first log-prob that is impossible for a token that another model sampled; None if there is none.

    Such a token may be as unlikely as it likes, but not impossible: the log-prob is finite.
    """
    values = np.asarray(log_probs, dtype=np.float64)
    right = np.isfinite(values) & (values <= MAX_LOG_PROB)
    if right.all():
        return None
    place = int(right.argmin())
    value = log_probs[place]
    shown = "null" if value is None else f"{value:g}"
    return f"token {place} has log-prob {shown} (allowed: finite, at most {MAX_LOG_PROB:g})"


def topk_problem(ids: NDArray[Any], log_probs: NDArray[Any], vocab_size: int | None) -> str | None:
    """Describe the first token whose likeliest tokens are impossible; None if there is none.

    They are in the vocabulary and different, and their log-probs are finite and at most 0.

    Args:
        ids: [T, K], integers.
        log_probs: [T, K], of these ids.
        vocab_size: vocabulary size of the model; none: unknown.
    """
    if log_probs.shape != ids.shape or ids.ndim != 2:
        return f"top-k log-probs have shape {log_probs.shape}, and their ids {ids.shape}"
    width = ids.shape[1]
    wrong = (ids < 0) if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        return f"token {place // width} has top-k id {ids.flat[place]} (allowed: {allowed})"
    right = np.isfinite(log_probs) & (log_probs <= MAX_LOG_PROB)
    if not right.all():
        place = int(right.argmin())
        value = log_probs.flat[place]
        allowed = f"finite, at most {MAX_LOG_PROB:g}"
        return f"token {place // width} has top-k log-prob {value:g} (allowed: {allowed})"
    ordered = np.sort(ids, axis=1)
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        place = int(twice.argmax())
        row, column = divmod(place, width - 1)
        return f"token {row} has top-k token {ordered[row, column]} twice"
    return None


def kept_problem(
    ids: Sequence[int] | NDArray[Any],
    counts: NDArray[np.integer[Any]],
    kept: Sequence[int] | NDArray[Any],
    vocab_size: int | None,
) -> str | None:
    """Describe the first token whose kept tokens are impossible; None if there is none.

    The kept tokens of a sampled token are in the vocabulary, are different, and contain the token.

    Args:
        ids: [T], sampled tokens.
        counts: [T], number of kept tokens of each; 0: not recorded.
        kept: the kept tokens, those of the first token first.
        vocab_size: vocabulary size of the model; none: unknown.
    """
    if (problem := id_problem(kept, vocab_size)) is not None:
        return f"kept {problem}"
    if not len(kept):
        return None
    places, values = np.repeat(np.arange(len(counts)), counts), np.asarray(kept, dtype=np.int64)
    found = np.zeros(len(counts), dtype=bool)
    found[places[values == np.asarray(ids, dtype=np.int64)[places]]] = True
    wrong = (counts > 0) & ~found
    if wrong.any():
        place = int(wrong.argmax())
        return f"token {place} has id {int(ids[place])}, which is not among its {int(counts[place])} kept tokens"
    size = int(values.max()) + 1
    keys = np.sort(places * size + values)  # one sort of numbers takes a third of the time of a sort by two columns
    twice = keys[1:][keys[1:] == keys[:-1]]
    return f"token {twice[0] // size} has kept token {twice[0] % size} twice" if len(twice) else None


def _segment_kept_problem(segment: Segment, vocab_size: int | None, *, needs_kept: bool) -> str | None:
    counts, ids = segment.kept_counts, segment.kept_ids
    if needs_kept:
        trains = np.asarray(segment.loss_mask) != 0
        lacks = trains if counts is None else trains & (np.asarray(counts) == 0)
        if lacks.any():
            return f"token {int(lacks.argmax())} has no kept tokens, which rollout.return_sampling_mask = true needs"
    if counts is None or ids is None:
        return None
    return kept_problem(np.asarray(segment.response_ids), np.asarray(counts), np.asarray(ids), vocab_size)


def are_possible(segments: Sequence[Segment], vocab_size: int | None) -> bool:
    """Whether no token id and no log-prob of many segments is impossible. Costs much less than a look at each."""
    if not segments:
        return True
    ids = np.concatenate([ids for segment in segments for ids in (segment.prompt_ids, segment.response_ids)])
    log_probs = np.concatenate([segment.rollout_log_probs for segment in segments])
    if len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        return False
    # of NaN both comparisons are false
    return not len(log_probs) or bool(log_probs.min() >= MIN_LOG_PROB and log_probs.max() <= MAX_LOG_PROB)


def sample_problem(
    segments: Sequence[Segment],
    vocab_size: int | None,
    *,
    num_tokens: int | None = None,
    needs_kept: bool = False,
    possible: bool = False,
) -> str | None:
    """Describe the first inconsistency of a sample; None if it is valid.

    Args:
        segments: in order.
        vocab_size: vocabulary size of the model; none: unknown.
        num_tokens: expected number of prompt and response tokens; none: unknown.
        needs_kept: whether each trained token needs the tokens that top-p and top-k kept.
        possible: whether `are_possible` holds for the segments.
    """
    for number, segment in enumerate(segments):
        where = f"segment {number}, " if len(segments) > 1 else ""
        if not possible:
            problem = id_problem(segment.prompt_ids, vocab_size)
            if problem is not None:
                return f"{where}prompt: {problem}"
            problem = id_problem(segment.response_ids, vocab_size) or log_prob_problem(segment.rollout_log_probs)
            if problem is not None:
                return f"{where}response: {problem}"
        if segment.temperature is not None and segment.temperature < GREEDY and np.any(segment.loss_mask):
            return f"{where}response: trained tokens were sampled at temperature {segment.temperature}, without chance"
        problem = _segment_kept_problem(segment, vocab_size, needs_kept=needs_kept)
        if problem is not None:
            return f"{where}response: {problem}"
    found = sum(len(segment.prompt_ids) + len(segment.response_ids) for segment in segments)
    if num_tokens is not None and found != num_tokens:
        return f"its segments have {found} tokens, but {num_tokens} are reported"
    return None
