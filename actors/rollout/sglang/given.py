"""Reads an engine's log-probs of given tokens, and the likeliest tokens at their places.

A response with the 32 likeliest of 8,192 tokens has 9 MB of JSON. It is decoded in parts, for a thread: a decoder holds
the interpreter's lock, so that one call for all of it would stop the event loop.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.rollout.sglang.answers import EMPTY_LIST, in_parts
from actors.rollout.sglang.errors import EngineFailed, EngineUnavailable

TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]  # what `Int32Array` holds
LogProbOf = tuple[float | None, TokenId, Any]  # a log-prob, the token that it is of, and its text
Likeliest = list[LogProbOf] | None


class TopkLogProbs(NamedTuple):
    """The K likeliest tokens at each of T places, as an engine gave them: NaN for a log-prob of null."""

    ids: NDArray[np.int64]  # [T, K]
    log_probs: NDArray[np.float32]  # [T, K], natural log


class GivenLogProbs(NamedTuple):
    """Log-probs of T given tokens, and the likeliest tokens at their places if they were asked for."""

    log_probs: list[float | None]
    topk: TopkLogProbs | None


class GivenMeta(msgspec.Struct, frozen=True):
    """The used part of the meta_info of such a response. Its lists stay JSON until they are decoded in parts."""

    finish_reason: dict[str, Any] | None = None
    input_token_logprobs: msgspec.Raw = EMPTY_LIST
    input_top_logprobs: msgspec.Raw = EMPTY_LIST


class GivenAnswer(msgspec.Struct, frozen=True):
    """Response of /generate to a request for the log-probs of given tokens."""

    meta_info: GivenMeta


_decode_answer = msgspec.json.Decoder(GivenAnswer).decode
_decode_tokens = msgspec.json.Decoder(list[LogProbOf]).decode
_decode_places = msgspec.json.Decoder(list[Likeliest]).decode


def read_given(url: str, data: bytes, asked: Sequence[int], topk: int) -> GivenLogProbs:
    """Read a response. Pure; for a thread.

    Args:
        url: of the engine, for errors.
        data: the response.
        asked: the tokens whose log-probs were requested.
        topk: number of the likeliest tokens at each place; 0: none.

    Raises:
        EngineUnavailable: the request was aborted.
        EngineFailed: it is unreadable, or for other tokens or another number of them.
    """
    try:
        return _read(url, data, asked, topk)
    except RecursionError:
        raise EngineFailed(f"{url}: unreadable answer: its lists and objects are nested too deeply") from None
    except ValueError as error:
        raise EngineFailed(f"{url}: unreadable answer: {error}") from error


def _read(url: str, data: bytes, asked: Sequence[int], topk: int) -> GivenLogProbs:
    meta = _decode_answer(data).meta_info
    if (meta.finish_reason or {}).get("type") == "abort":
        raise EngineUnavailable(f"{url}: the request was aborted")
    parts = in_parts(meta.input_token_logprobs, b"],", _decode_tokens)
    found = [entry for part in parts for entry in part][1:]  # the first entry is of the token before
    if len(found) != len(asked):
        raise EngineFailed(f"{url}: {len(found)} log-probs of {len(asked)} tokens")
    wrong = next((place for place, entry in enumerate(found) if entry[1] != asked[place]), None)
    if wrong is not None:
        raise EngineFailed(f"{url}: log-prob {wrong} is of token {found[wrong][1]}, not of {asked[wrong]}")
    likeliest = _topk(url, meta.input_top_logprobs, len(asked), topk) if topk else None
    return GivenLogProbs([log_prob for log_prob, _, _ in found], likeliest)


def _topk(url: str, data: msgspec.Raw, num_places: int, topk: int) -> TopkLogProbs:
    """Pack the likeliest tokens of each place.

    Raises:
        EngineFailed: they are of another number of places, or not `topk` at each.
        ValueError: they cannot be decoded.
    """
    place, ids, log_probs = -1, list[NDArray[np.int64]](), list[NDArray[np.float32]]()  # -1: of the token before
    for part in in_parts(data, b"]],", _decode_places):
        taken = part[1:] if place < 0 else part
        place = max(place, 0)
        counts = [0 if likeliest is None else len(likeliest) for likeliest in taken]
        wrong = next((index for index, count in enumerate(counts) if count != topk), None)
        if wrong is not None:
            raise EngineFailed(f"{url}: token {place + wrong} has {counts[wrong]} top-k log-probs, not {topk}")
        entries = [entry for likeliest in taken if likeliest is not None for entry in likeliest]
        ids.append(np.array([token for _, token, _ in entries], np.int64))
        log_probs.append(np.array([log_prob for log_prob, _, _ in entries], np.float32))
        place += len(taken)
    if max(place, 0) != num_places:
        raise EngineFailed(f"{url}: top-k log-probs at {max(place, 0)} places for {num_places} tokens")
    shape = num_places, topk
    return TopkLogProbs(np.concatenate(ids).reshape(shape), np.concatenate(log_probs).reshape(shape))
