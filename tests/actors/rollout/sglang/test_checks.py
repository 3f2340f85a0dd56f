"""What cannot be true of an engine's answer is an error of that engine, over a real connection, streamed and whole."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.checks import ExpectedAnswer
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import BadAnswer, EngineBusy, EngineFailed, RequestRefused
from actors.rollout.sglang.reading import AnswerReader

pytestmark = pytest.mark.anyio
IDS = [3, 4, 5, 6]
VOCAB: Final = 16  # of the model that is asked
Spoil = Callable[[dict[str, Any]], Any]


def _log_prob(value: Any) -> Spoil:
    def spoil(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][-1][0] = value

    return spoil


def _token(value: int) -> Spoil:
    def spoil(answer: dict[str, Any]) -> None:
        answer["output_ids"][-1] = answer["meta_info"]["output_token_logprobs"][-1][1] = value

    return spoil


def _meta(**fields: Any) -> Spoil:
    return lambda answer: answer["meta_info"].update(fields)


def _shift(answer: dict[str, Any]) -> None:
    triples = answer["meta_info"]["output_token_logprobs"]
    triples[:] = [*triples[1:], [-0.5, 0, None]]


BAD_ANSWERS: Final[dict[str, tuple[Spoil, str]]] = {  # and what is said of it
    "log-prob null": (_log_prob(None), "log-prob null"),
    "log-prob NaN": (_log_prob(float("nan")), "unreadable answer|bad chunk"),
    "log-prob -inf": (_log_prob(float("-inf")), "unreadable answer|bad chunk"),
    "log-prob -1e39": (_log_prob(-1e39), r"log-prob -1e\+39"),
    "log-prob of float32's end": (_log_prob(-3.4e38), r"log-prob -3.4e\+38"),
    "log-prob of float16's end": (_log_prob(-65504.0), "log-prob -65504"),
    "log-prob 5": (_log_prob(5.0), "log-prob 5"),
    "log-prob missing": (lambda answer: answer["meta_info"]["output_token_logprobs"].pop(), "3 log-probs and 4 tokens"),
    "log-probs missing": (_meta(output_token_logprobs=[]), "0 log-probs and 4 tokens"),
    "log-probs shifted": (_shift, "log-prob is of"),
    "id -1": (_token(-1), "has id -1"),
    "id of the vocabulary's size": (_token(VOCAB), r"has id 16 \(allowed: 0 to 15\)"),
    "id 10^6": (_token(10**6), "has id 1000000"),
    "id 2^63": (_token(2**63), "has id 9223372036854775808"),
    "fewer tokens than said": (_meta(completion_tokens=9), "9"),
    "a negative count": (_meta(completion_tokens=-1), "completion_tokens"),
    "another request": (_meta(id="another"), "it answers request another"),
    "no request": (_meta(id=None), "it answers request null"),
    "another prompt": (_meta(prompt_tokens=7), "prompt_tokens is 7, but 2 were sent"),
    "spans too short": (_meta(weight_versions=[{"version": "1", "start": 0, "end": 3}]), "cover 3 of 4"),
    "spans too long": (_meta(weight_versions=[{"version": "1", "start": 0, "end": 5}]), "cover 5 of 4"),
    "spans with a gap": (_meta(weight_versions=[{"version": "1", "start": 1, "end": 4}]), "does not follow token 0"),
    "no weights": (_meta(weight_versions=[], weight_version=None), "does not report which weights"),
    "a token behind the stop token": (
        _meta(finish_reason={"type": "stop", "matched": 9}),
        "it stopped at token 9, but",
    ),
    "an unknown end": (_meta(finish_reason={"type": "tired"}), "'tired': expected"),
    "an end of no type": (_meta(finish_reason={"type": ["stop"]}), "expected stop, length or abort"),
}
BODY: dict[str, Any] = {"rid": "r", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}}


def answer(ids: list[int] = IDS, **meta: Any) -> dict[str, Any]:
    fields = {
        "id": "r",
        "finish_reason": {"type": "stop"},
        "weight_version": "1@e",
        "weight_versions": [{"version": "1@e", "start": 0, "end": len(ids)}] if ids else [],
        "completion_tokens": len(ids),
        "prompt_tokens": 2,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return {"text": "abcd"[: len(ids)], "output_ids": list(ids), "meta_info": fields | meta}


@asynccontextmanager
async def answering(body: bytes, content_type: str = "application/json") -> AsyncGenerator[tuple[SglangClient, str]]:
    """A server that answers everything with these bytes, a client, and the server's URL."""

    async def give(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type)

    app = web.Application()
    app.router.add_post("/generate", give)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield SglangClient(session, generate_timeout_s=10), f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def readers_of(body: dict[str, Any]) -> list[AnswerReader]:
    """One for each prompt of a request."""
    rid, prompts, limit = body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"]
    if not prompts or not isinstance(prompts[0], list):
        return [AnswerReader(SampleBuffer(), ExpectedAnswer(rid, len(prompts), limit, VOCAB))]
    return [
        AnswerReader(SampleBuffer(), ExpectedAnswer(f"{rid}_{index}", len(prompt), limit, VOCAB))
        for index, prompt in enumerate(prompts)
    ]


async def whole(said: bytes, body: dict[str, Any] = BODY) -> list[AnswerReader]:
    readers = readers_of(body)
    async with answering(said) as (client, url):
        await client.generate(url, body, readers)
    return readers


async def streamed(*chunks: bytes, body: dict[str, Any] = BODY) -> AnswerReader:
    said = b"".join(b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]"))
    (reader,) = readers_of(body)
    async with answering(said, "text/event-stream") as (client, url):
        await client.stream(url, body, reader)
    return reader


def spoilt(spoil: Spoil) -> bytes:
    given = answer()
    spoil(given)
    return json.dumps(given).encode()


async def test_a_right_answer_is_taken_streamed_and_whole() -> None:
    (taken,) = await whole(json.dumps(answer()).encode())
    assert taken.ids.tolist() == IDS
    assert (await streamed(json.dumps(answer()).encode())).ids.tolist() == IDS


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_whole_answer_that_cannot_be_true_is_its_engines_failure(name: str) -> None:
    spoil, said = BAD_ANSWERS[name]
    with pytest.raises(BadAnswer, match=said) as raised:
        await whole(spoilt(spoil))
    assert "http://127.0.0.1:" in str(raised.value)
    assert raised.value.label == ("" if name == "no weights" else "1@e")


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_chunk_that_cannot_be_true_is_its_engines_failure(name: str) -> None:
    spoil, said = BAD_ANSWERS[name]
    with pytest.raises(BadAnswer, match=said) as raised:
        await streamed(spoilt(spoil))
    assert raised.value.label == ("" if name == "no weights" else "1@e")


@pytest.mark.parametrize("place", [0, 1])
async def test_a_wrong_number_early_in_a_stream_is_found_when_it_comes(place: int) -> None:
    chunks = [answer(IDS[:2], finish_reason=None), answer(IDS[2:], completion_tokens=4)]
    chunks[1]["meta_info"]["weight_versions"] = [{"version": "1@e", "start": 0, "end": 4}]
    chunks[place]["meta_info"]["output_token_logprobs"][0][0] = None
    with pytest.raises(BadAnswer, match="log-prob null"):
        await streamed(*(json.dumps(chunk).encode() for chunk in chunks))


@pytest.mark.parametrize("said", [b"", b"<html>", b"{}", b"[]", b"[DONE]", b'{"error": "x"}', b"[" * 100_000])
async def test_what_is_no_answer_is_the_engines_failure(said: bytes) -> None:
    with pytest.raises(BadAnswer, match="unreadable answer"):
        await whole(said)


async def test_bad_utf8_is_the_engines_failure_wherever_it_is() -> None:
    said = json.dumps(answer()).encode().replace(b"abcd", b"ab\xffd")
    with pytest.raises(BadAnswer, match="unreadable answer"):
        await whole(said)
    with pytest.raises(BadAnswer, match="bad chunk") as raised:
        await streamed(said)
    assert raised.value.label == "1@e"


@pytest.mark.parametrize(("ids", "limit"), [([], 8), (IDS, 3)])
async def test_no_token_without_an_abort_and_more_than_asked_for_are_refused(ids: list[int], limit: int) -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": limit}}
    said = json.dumps(answer(ids)).encode()
    with pytest.raises(BadAnswer, match=r"received no token|received 4 tokens; the request allows 3"):
        await whole(said, body)
    with pytest.raises(BadAnswer, match=r"received no token|received 4 tokens; the request allows 3"):
        await streamed(said, body=body)
    aborted = json.dumps(answer([], finish_reason={"type": "abort"}, weight_version=None)).encode()
    (taken,) = await whole(aborted)
    assert taken.ids.tolist() == []
    assert (await streamed(aborted)).ended


async def test_an_empty_prompt_is_refused_by_the_engine_not_by_an_index_error() -> None:
    reason = {"type": "abort", "message": "input_ids is empty", "status_code": 400}
    refused = json.dumps(answer([], finish_reason=reason, prompt_tokens=0)).encode()
    with pytest.raises(RequestRefused, match="input_ids is empty"):
        await whole(refused, {**BODY, "input_ids": []})
    with pytest.raises(RequestRefused, match="input_ids is empty"):
        await streamed(refused, body={**BODY, "input_ids": []})


async def test_the_answers_to_a_batch_are_those_of_its_prompts_in_order() -> None:
    body = {**BODY, "input_ids": [[1, 2], [1, 2]]}
    right = [answer(id="r_0"), answer(id="r_1")]
    assert len(await whole(json.dumps(right).encode(), body)) == 2
    with pytest.raises(BadAnswer, match="it answers request r_1, but r_0 was sent"):
        await whole(json.dumps(right[::-1]).encode(), body)
    with pytest.raises(BadAnswer, match="1 answers to 2 prompts"):
        await whole(json.dumps(right[:1]).encode(), body)


@pytest.mark.parametrize(("code", "error"), [(503, EngineBusy), (500, EngineFailed)])
async def test_an_abort_with_a_status_under_http_200_is_that_error(code: int, error: type[Exception]) -> None:
    reason = {"type": "abort", "message": "queue is full", "status_code": code}
    with pytest.raises(error, match="queue is full"):
        await whole(json.dumps(answer([], finish_reason=reason)).encode())


async def test_a_stream_that_refuses_its_prompt_says_so_whatever_token_it_ends_with() -> None:
    reason = {"type": "abort", "message": "Input length (506 tokens) exceeds the limit", "status_code": 400}
    refused = answer([11], finish_reason=reason, output_token_logprobs=[])  # as SGLang 0.5.23 ends it
    with pytest.raises(RequestRefused, match="exceeds the limit"):
        await streamed(json.dumps(refused).encode())
