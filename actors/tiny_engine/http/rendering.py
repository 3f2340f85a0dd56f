"""Request bodies and answers of the endpoints, above all POST /generate: text, tokens and meta_info as in SGLang."""

from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from actors.tiny_engine.engine.requests import Finish, Request, Span
from actors.tiny_engine.http import bodies
from actors.tiny_engine.http.api import Job
from actors.tiny_engine.model.text import Text

CUT_CHARACTER: Final = "\ufffd"  # decoder output for an incomplete multi-byte character


JSON: Final = "application/json"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def body_of(request: web.Request, struct: type[T], *, needed: bool = True) -> T:
    """Decode a request's body; unless `needed`, an empty body counts as {}.

    Raises:
        SchemaError: the body is not JSON, or a field has the wrong type.
    """
    data = await request.read()
    return bodies.decode_body(data if data or needed else b"{}", struct)


def json_answer(body: object, *, status: int = 200) -> web.Response:
    """Build an HTTP response with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON)


def error_answer(status: int, message: str) -> web.Response:
    """Build an error response, in the format of most SGLang endpoints."""
    return json_answer({"error": {"message": message}}, status=status)


def schema_error(error: Exception) -> web.Response:
    """Build the error response to an invalid body."""
    body = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return json_answer(body, status=400)


class Progress(NamedTuple):
    """Progress of a request: number of output tokens, and its end if it has ended."""

    num_tokens: int
    finish: Finish | None
    spans: tuple[Span, ...] = ()  # weight versions of the tokens


class SentSoFar(NamedTuple):
    """Tokens and characters that an incremental stream has sent."""

    num_tokens: int = 0
    num_characters: int = 0


class Clock(NamedTuple):
    """Timestamps of an answer: seconds since the request arrived, and Unix time in seconds."""

    latency_s: float
    now_s: float


def answer(
    job: Job, progress: Progress, *, version: str, clock: Clock, text: Text | None, sent: SentSoFar | None = None
) -> dict[str, Any]:
    """Build the answer to one request: complete, or the part after `sent`."""
    request, rendering = job
    if sent is not None and progress.finish is not None and progress.finish.queued:
        sent, start = None, 0  # SGLang repeats everything except the ids; of those, only the last
        first = max(0, progress.num_tokens - 1)
    else:
        first = start = sent.num_tokens if sent else 0
    shown = rendered_text(job, progress, text)
    body: dict[str, Any] = {
        "text": shown[sent.num_characters :] if sent else shown,
        "output_ids": request.output_ids[first : progress.num_tokens],
        "meta_info": _meta_info(request, progress, version, clock),
    }
    if rendering.prompt_ids:
        body["prompt_token_ids"] = request.prompt_ids
    if rendering.log_probs:
        body["meta_info"] |= _log_probs(job, start, progress.num_tokens, text)
    if request.sampling.returns_mask:
        body["meta_info"] |= {
            "output_token_sampling_mask": request.masks[start : progress.num_tokens],
            "output_token_sampling_logprobs": request.mask_log_probs[start : progress.num_tokens],
            "output_token_sampling_mask_length": progress.num_tokens,
        }
    return body


def rendered_text(job: Job, progress: Progress, text: Text | None) -> str:
    """The output's text, trimmed at its stop token or stop text unless the request keeps it."""
    if text is None:
        return ""
    request, rendering = job
    matched = progress.finish.matched if progress.finish else None
    ids = request.output_ids[: progress.num_tokens]
    shown = text.decode(
        ids[:-1] if isinstance(matched, int) and rendering.stop_trim else ids,
        skip_special_tokens=rendering.skip_special_tokens,
    )
    if isinstance(matched, str) and (start := shown.find(matched)) >= 0:
        return shown[: start if rendering.stop_trim else start + len(matched)]
    return shown if progress.finish else shown.rstrip(CUT_CHARACTER)


def _meta_info(request: Request, progress: Progress, version: str, clock: Clock) -> dict[str, Any]:
    finish = progress.finish
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": _finish_reason(request, finish)}
    if finish is None or not finish.queued:  # SGLang omits these for a request aborted in the queue
        meta["prompt_tokens"] = len(request.prompt_ids)
        meta["cached_tokens"] = request.num_cached
        meta["cached_tokens_details"] = None
        meta["num_retractions"] = request.num_retractions
    meta["completion_tokens"] = progress.num_tokens
    meta["reasoning_tokens"] = 0
    meta["weight_version"] = version
    spans = progress.spans  # SGLang reports them only at the end
    meta["weight_versions"] = [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
    meta["e2e_latency"] = clock.latency_s
    meta["dp_rank"] = None
    meta["response_sent_to_client_ts"] = clock.now_s
    return meta


def _finish_reason(request: Request, finish: Finish | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": request.stopping.limit}
    if finish.queued:
        return {"type": "abort", "message": finish.message}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def _log_probs(job: Job, start: int, end: int, text: Text | None) -> dict[str, Any]:
    request, rendering = job
    names = text if rendering.text_in_log_probs else None
    triples = _triples(request.log_probs[start:end], request.output_ids[start:end], names)
    inputs: list[tuple[float | None, int, str | None]] = []
    if request.logprob_start >= 0:
        tokens = request.prompt_ids[request.logprob_start :]
        inputs = _triples([None, *(request.input_log_probs or [])], tokens, names)
    top = {}
    if request.num_top:
        places = [_triples(*place, names) for place in zip(*request.input_top, strict=True)]
        top = {"input_top_logprobs": [None, *places], "output_top_logprobs": []}
    return {
        **top,
        "input_token_logprobs": inputs,
        "output_token_logprobs": triples,
        "output_token_logprobs_length": end,
    }


def _triples(
    log_probs: list[float] | list[float | None], ids: list[int], text: Text | None
) -> list[tuple[float | None, int, str | None]]:
    """Triples of log-prob, token and, if requested, text. Shorter than `ids` until the prompt is computed."""
    if text is None:
        return list(zip(log_probs, ids, repeat(None), strict=False))
    names = (text.decode([token], skip_special_tokens=False) for token in ids)
    return list(zip(log_probs, ids, names, strict=False))
