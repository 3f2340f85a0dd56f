"""Unusual answers of an inference server, as a table of `Case` rows.

`damaged` changes the contents of a chunk or an answer, and `bytes_instead` replaces its bytes.
"""

import copy
import gzip
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tests.support.spoiling_proxy import DONE, Case, Spoil, Spoiled, Truth, event_of

HTML: Final = b"<html><body>Bad gateway, please try again later.</body></html>"
LORIS_S: Final = 1.0  # seconds between two bytes
VOCAB_SIZE: Final = 64  # that of tiny_models.write_model
BAD_LOG_PROBS: Final = (math.nan, math.inf, -math.inf, -1e39, -3.4e38, -65504.0, 5.0)

Change = Callable[[dict[str, Any]], None]


def damaged(change: Change, *, last: bool = False) -> Spoil:
    """Change one part of an answer: one with tokens in the middle of a stream, or the last one with the reason."""

    def spoil(truth: Truth) -> Spoiled:
        parts = copy.deepcopy(truth.parts)
        with_tokens = [part for part in parts if part["output_ids"]]
        change(parts[-1] if last or not with_tokens else with_tokens[len(with_tokens) // 2])
        return Spoiled(truth.encoded(parts))

    return spoil


def at_token(key: int, value: object) -> Change:
    """Change a token in the middle: its log-prob (key 0), or its id there and among the ids (key 1)."""

    def change(part: dict[str, Any]) -> None:
        index = len(part["output_ids"]) // 2
        triples = part["meta_info"]["output_token_logprobs"]
        triples[index - len(part["output_ids"])][key] = value
        if key == 1:
            part["output_ids"][index] = value

    return change


def with_meta(**values: Any) -> Change:
    """Change fields of meta_info; `...` removes a field."""

    def change(part: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is ...:
                part["meta_info"].pop(name, None)
            else:
                part["meta_info"][name] = value

    return change


def ended(reason: object) -> Spoil:
    """Change the finish reason."""
    return damaged(with_meta(finish_reason=reason), last=True)


def aborted(code: int | None, message: str, *, whole_status: int = 200) -> Spoil:
    """Abort before the first token: with status 200 in a stream, with its own status in a complete answer."""
    reason = {"type": "abort", "message": message, "status_code": code, "err_type": None}

    def spoil(truth: Truth) -> Spoiled:
        if not truth.streamed and whole_status != 200:
            return Spoiled([json.dumps({"error": {"message": message, "code": code}}).encode()], status=whole_status)
        parts = copy.deepcopy(truth.parts[:1] if truth.streamed else truth.parts)
        for part in parts:
            part["text"], part["output_ids"] = "", []
            empty = {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": []}
            part["meta_info"] |= {"finish_reason": reason, **empty}
        return Spoiled(truth.encoded(parts))

    return spoil


def bytes_instead(
    data: Sequence[bytes], *, status: int = 200, headers: dict[str, str] | None = None, **how: Any
) -> Spoil:
    """Send other bytes, whatever the request was."""
    return lambda _: Spoiled(data, status=status, headers=headers or {}, **how)


def framed(change: Callable[[list[bytes]], Sequence[bytes]], **how: Any) -> Spoil:
    """Send the same answer with other boundaries or another order."""
    return lambda truth: Spoiled(change(truth.encoded()), **how)


def error_object(body: object) -> Spoil:
    """Send an error object with status 200."""
    encoded = json.dumps(body).encode()
    return lambda truth: Spoiled([b"data: " + encoded + b"\n\n", DONE] if truth.streamed else [encoded])


def broken_off(share: float) -> Spoil:
    """Close the connection after a share of the answer."""

    def cut(written: list[bytes]) -> Sequence[bytes]:
        joined = b"".join(written)
        return [joined[: int(len(joined) * share)]]

    return framed(cut, breaks=True)


def slowly(truth: Truth) -> Spoiled:
    """Send one byte per second."""
    return Spoiled([bytes([byte]) for byte in event_of({"text": "never read to its end" * 99})], pause_s=LORIS_S)


def split_everywhere(written: list[bytes]) -> Sequence[bytes]:
    joined = b"".join(written)
    return [joined[start : start + 7] for start in range(0, len(joined), 7)]


def without_spaces(written: list[bytes]) -> Sequence[bytes]:
    return [b"data:" + part.removeprefix(b"data: ") for part in written]


def without_a_middle_one(written: list[bytes]) -> Sequence[bytes]:
    return [*written[:1], *written[2:]]


def doubled(written: list[bytes]) -> Sequence[bytes]:
    return [written[0], *written]


def swapped(written: list[bytes]) -> Sequence[bytes]:
    return [written[1], written[0], *written[2:]]


def in_the_middle(old: bytes, new: bytes) -> Callable[[list[bytes]], Sequence[bytes]]:
    """Replace some bytes in one event."""

    def change(written: list[bytes]) -> Sequence[bytes]:
        index = (len(written) - 1) // 2
        assert old in written[index]
        return [part.replace(old, new, 1) if at == index else part for at, part in enumerate(written)]

    return change


def shifted(part: dict[str, Any]) -> None:
    """Give each token the log-prob triple of the token before."""
    triples = part["meta_info"]["output_token_logprobs"]
    triples[:] = [[-0.5, 10**6, None], *triples[:-1]]


def spans(bounds: Callable[[int], Sequence[tuple[int, int]]]) -> Change:
    """Set weight spans with these bounds, by the number of tokens."""

    def change(part: dict[str, Any]) -> None:
        meta = part["meta_info"]
        label, count = meta["weight_version"], meta["completion_tokens"]
        meta["weight_versions"] = [{"version": label, "start": start, "end": end} for start, end in bounds(count)]

    return change


def too_many(truth: Truth) -> Spoiled:
    """Append a token after the last one, with consistent counts and spans."""
    parts = copy.deepcopy(truth.parts)
    meta = parts[-1]["meta_info"]
    parts[-1]["output_ids"].append(3)
    meta["output_token_logprobs"].append([-0.5, 3, None])
    meta["completion_tokens"] += 1
    spans(lambda count: [(0, count)])(parts[-1])
    return Spoiled(truth.encoded(parts))


def no_token(truth: Truth) -> Spoiled:
    """End successfully without any token."""
    parts = copy.deepcopy(truth.parts[-1:] if truth.streamed else truth.parts)
    for part in parts:
        part["text"], part["output_ids"] = "", []
        part["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": []}
        part["meta_info"]["finish_reason"] = {"type": "stop", "matched": None}
    return Spoiled(truth.encoded(parts))


only_streamed = partial(Case, whole=False)
only_whole = partial(Case, streamed=False)

UNWILLING: Final = (
    Case("an abort with 503", aborted(503, "The request queue is full.", whole_status=503)),
    Case("an abort with 500", aborted(500, "Internal error.", whole_status=500)),
    only_whole("an abort with 503 under 200", aborted(503, "The request queue is full.")),
    Case("HTTP 500", bytes_instead([b"Internal Server Error"], status=500)),
    Case("HTTP 503", bytes_instead([b"Service Unavailable"], status=503)),
    Case("HTTP 429", bytes_instead([b"Too Many Requests"], status=429)),
)
EMPTY: Final = (
    Case("an empty body", bytes_instead([])),
    Case("HTML", bytes_instead([HTML], headers={"Content-Type": "text/html"})),
    Case("{}", error_object({})),
    only_whole("a list of two", lambda truth: Spoiled([json.dumps([*truth.parts, *truth.parts]).encode()])),
    Case("only [DONE]", bytes_instead([DONE])),
    Case("a redirect to a page", bytes_instead([], status=302, headers={"Location": "/model_info"})),
    Case("a redirect to itself", bytes_instead([], status=307, headers={"Location": "/generate"})),
    Case("a broken gzip", bytes_instead([b"\x1f\x8b no gzip"], headers={"Content-Encoding": "gzip"})),
    Case("an error as an object", error_object({"error": {"message": "no", "code": 500}})),
    Case("an error as a text", error_object({"error": "no"})),
    Case("an error with spaces", error_object({"message": "no", "error": {"code": 500, "message": "no"}})),
    Case("an error of another kind", error_object({"object": "error", "message": "no", "code": 500})),
    Case("a detail", error_object({"detail": "no"})),
)
BROKEN: Final = (
    Case("a break at once", bytes_instead([], breaks=True)),
    Case("a break without headers", bytes_instead([], hangs=False, breaks=True)),
    Case("a break in the middle", broken_off(0.5)),
    only_streamed("an end in the middle", framed(lambda written: written[: len(written) // 2])),
    only_streamed("an end before the last chunk", framed(lambda written: [*written[:-2], DONE])),
)
FRAMES: Final = (
    only_streamed("CRLF", framed(lambda written: [part.replace(b"\n", b"\r\n") for part in written]), legal=True),
    only_streamed("comments", framed(lambda written: [b": ping\n\n: pong\n" + part for part in written]), legal=True),
    only_streamed("data without a space", framed(without_spaces), legal=True),
    only_streamed(
        "other fields", framed(lambda written: [b"event: x\nid: 1\n" + part for part in written]), legal=True
    ),
    only_streamed("bad UTF-8", framed(in_the_middle(b'"text": "', b'"text": "\xff'))),
    only_whole("bad UTF-8 in an answer", framed(in_the_middle(b'"text": "', b'"text": "\xff'))),
    only_streamed("broken JSON", framed(in_the_middle(b'"output_ids"', b'"output_ids'))),
    only_streamed("a chunk lost", framed(without_a_middle_one)),
    only_streamed("a chunk doubled", framed(doubled)),
    only_streamed("chunks swapped", framed(swapped)),
    only_streamed("split everywhere", framed(split_everywhere), legal=True),
    only_whole(
        "gzip",
        lambda truth: Spoiled([gzip.compress(b"".join(truth.encoded()))], headers={"Content-Encoding": "gzip"}),
        legal=True,
    ),
)
LOG_PROBS: Final = (
    Case("a null log-prob", damaged(at_token(0, None))),
    *(Case(f"a log-prob of {value:g}", damaged(at_token(0, value))) for value in BAD_LOG_PROBS),
    Case("a log-prob missing", damaged(lambda part: part["meta_info"]["output_token_logprobs"].pop())),
    Case("all log-probs missing", damaged(with_meta(output_token_logprobs=[]))),
    Case("log-probs of the tokens before", damaged(shifted)),
)
IDS: Final = tuple(Case(f"token id {value}", damaged(at_token(1, value))) for value in (-1, VOCAB_SIZE, 10**6, 2**63))
COUNTS: Final = (
    Case("fewer tokens than said", damaged(with_meta(completion_tokens=10**6))),
    Case("a negative count", damaged(with_meta(completion_tokens=-1))),
    Case("more tokens than asked for", too_many),
    Case("no token and a stop", no_token),
)
SPANS: Final = (
    Case("weight spans too short", damaged(spans(lambda count: [(0, count - 1)]), last=True)),
    Case("weight spans too long", damaged(spans(lambda count: [(0, count + 1)]), last=True)),
    Case("weight spans over each other", damaged(spans(lambda count: [(0, count), (count - 1, count)]), last=True)),
    Case("weights of another", damaged(with_meta(weight_version="7@other", weight_versions=[]), last=True)),
    Case("no weights", damaged(with_meta(weight_version=None, weight_versions=[]), last=True)),
)
IDENTITY: Final = (
    Case("another request's answer", damaged(with_meta(id="another"))),
    Case("another prompt's answer", damaged(with_meta(prompt_tokens=10**6))),
)
ENDS: Final = (
    Case("an unknown reason", ended({"type": "tired"})),
    Case("an abort that nobody asked for", aborted(None, "Abort")),
)
TIME: Final = (
    Case("silence", bytes_instead([], hangs=True), asks=False),
    only_streamed("silence behind the headers", bytes_instead([b": hello\n\n"], hangs=True), asks=False),
    Case("a byte a second", slowly, asks=False),
)

CASES: Final = (*UNWILLING, *EMPTY, *BROKEN, *FRAMES, *LOG_PROBS, *IDS, *COUNTS, *SPANS, *IDENTITY, *ENDS, *TIME)
