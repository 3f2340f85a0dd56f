"""Long responses, of sampled tokens and of given ones, are decoded in parts, and not on the event loop."""

import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang import client as client_module
from actors.rollout.sglang.answers import in_parts
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineFailed
from actors.rollout.sglang.given import read_given
from actors.rollout.sglang.reading import AnswerReader
from tests.support.loop_watch import watching_loop

NUM_TOKENS, TOPK = 8_192, 32
LONGEST = 32_768  # tokens of an answer

entries = st.lists(st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 99), st.none()), max_size=3) | st.none())


@given(entries, st.integers(1, 200))
def test_parts_of_a_list_are_the_list(places: list[Any], part_bytes: int) -> None:
    whole = msgspec.Raw(msgspec.json.encode(places))
    decode = msgspec.json.Decoder(list[Any]).decode
    parts = list(in_parts(whole, b"]],", decode, part_bytes))
    assert [place for part in parts for place in part] == decode(whole)


@pytest.mark.parametrize("data", [b"[[1,2]", b"[[1,2]],[[3]]]", b'{"a":[[1]],"b":[[1]]}', b"[[1]],"])
def test_what_is_no_list_is_refused_in_parts_too(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        list(in_parts(msgspec.Raw(data), b"]],", msgspec.json.Decoder(list[Any]).decode, 1))


def long_answer(num_tokens: int, topk: int) -> tuple[list[int], bytes]:
    """A response with the likeliest tokens at each place, and the tokens that were asked for."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (num_tokens + 1, topk)).tolist()
    values = (-10 * rng.random((num_tokens + 1, topk))).tolist()
    places = [[(v, i, None) for v, i in zip(vs, js, strict=True)] for vs, js in zip(values, ids, strict=True)]
    meta = {
        "finish_reason": {"type": "length"},
        "input_token_logprobs": [(None, 0, None), *((-1.5, place[0][1], None) for place in places[1:])],
        "input_top_logprobs": [None, *places[1:]],
    }
    return [place[0] for place in ids[1:]], msgspec.json.encode({"meta_info": meta})


def test_a_long_response_has_the_same_tokens_in_parts() -> None:
    asked, data = long_answer(2_000, 4)
    found = read_given("http://e", data, asked, 4)
    assert found.topk is not None
    places = msgspec.json.decode(data)["meta_info"]["input_top_logprobs"][1:]
    assert found.topk.ids.tolist() == [[entry[1] for entry in place] for place in places]
    np.testing.assert_allclose(found.topk.log_probs, [[entry[0] for entry in place] for place in places], rtol=1e-6)
    assert found.log_probs == [-1.5] * 2_000
    with pytest.raises(EngineFailed, match="2000 log-probs of 1999 tokens"):
        read_given("http://e", data, asked[:-1], 4)


@pytest.mark.anyio
@pytest.mark.parametrize("text", [None, '"],["'])
async def test_an_unstreamed_answer_of_32768_tokens_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """Also one whose tokens come as texts that look like the end of a list: that one in a single piece, and right."""
    ids = np.random.default_rng(0).integers(0, 150_000, LONGEST if text is None else 8_192).tolist()
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        "completion_tokens": len(ids),
        "output_token_logprobs": [(-index / len(ids), token, text) for index, token in enumerate(ids)],
    }
    data = msgspec.json.encode({"text": "a" * len(ids), "output_ids": ids, "meta_info": meta})

    async def received(*_: object) -> bytes:
        return data

    @asynccontextmanager
    async def answered(*_: object) -> AsyncGenerator[None]:
        yield

    monkeypatch.setattr(client_module, "_read_all", received)
    buffer = SampleBuffer()
    async with aiohttp.ClientSession() as session:
        client = SglangClient(session)
        monkeypatch.setattr(client, "_request", answered)
        gc.collect()
        with watching_loop() as watch:
            await client.generate("http://e", {}, [AnswerReader(buffer)])
    assert buffer.ids.tolist() == ids
    np.testing.assert_allclose(buffer.log_probs, [-index / len(ids) for index in range(len(ids))], rtol=1e-6)
    assert watch.num_runs > 0
    assert watch.over() == []


@pytest.mark.anyio
async def test_the_likeliest_tokens_of_8192_places_do_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, data = long_answer(NUM_TOKENS, TOPK)

    async def post(*_: object) -> bytes:
        return data

    async with aiohttp.ClientSession() as session:
        client = SglangClient(session)
        monkeypatch.setattr(client, "_post", post)
        gc.collect()
        with watching_loop() as watch:
            found = await client.given_log_probs("http://e", "r", [0, *asked], 1, 60.0, TOPK)
    assert found.topk is not None
    assert found.topk.ids.shape == (NUM_TOKENS, TOPK)
    assert watch.num_runs > 0
    assert watch.over() == []
