"""POST /generate of a real tiny engine: fields, batches, text, stops, streams, bad requests."""

from typing import Any

import anyio
import pytest

from actors.tiny_engine.http.api import CallReader, Limits
from tests.support.tiny_client import PROMPT, EngineClient, generate_body
from tests.support.tiny_models import CHARACTERS

pytestmark = pytest.mark.anyio


async def test_an_answer_has_sglangs_fields(client: EngineClient) -> None:
    answer = await client.generate(rid="fields", return_prompt_token_ids=True, logprob_start_len=0)
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["text"] == "".join(CHARACTERS[token - 2] for token in answer["output_ids"] if token > 1)
    meta = answer["meta_info"]
    assert meta["id"] == "fields"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 0)
    assert meta["weight_version"] == "v0"
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 6}]
    assert meta["e2e_latency"] > 0
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert all(log_prob <= 0 for log_prob, _, _ in meta["output_token_logprobs"])
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    assert all(entry[0] <= 0 for entry in meta["input_token_logprobs"][1:])


async def test_log_probs_come_only_when_asked_for(client: EngineClient) -> None:
    silent = await client.generate(return_logprob=False)
    assert "output_token_logprobs" not in silent["meta_info"]
    default = await client.generate()
    assert default["meta_info"]["input_token_logprobs"] == []
    named = await client.generate(return_text_in_logprobs=True, params={"logit_bias": None})
    assert all(name is not None for _, _, name in named["meta_info"]["output_token_logprobs"])


async def test_a_batch_answers_in_order_under_prefixed_ids(client: EngineClient) -> None:
    prompts = [[3, 4, 5], [6], [7, 8]]
    params = [{"max_new_tokens": length} for length in (9, 1, 4)]
    body = {"input_ids": prompts, "sampling_params": params, "rid": "group", "return_logprob": [True, False, True]}
    answers = (await client.post("/generate", body)).body
    assert [answer["meta_info"]["id"] for answer in answers] == ["group_0", "group_1", "group_2"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 1, 2]
    assert [len(answer["output_ids"]) <= limit for answer, limit in zip(answers, (9, 1, 4), strict=True)] == [True] * 3
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False, True]
    listed = await client.generate(input_ids=[[3], [4]], rid=["a", "b"])
    assert [answer["meta_info"]["id"] for answer in listed] == ["a", "b"]


async def test_n_samples_of_one_prompt_have_fresh_ids(client: EngineClient) -> None:
    answers = await client.generate(rid="many", params={"n": 4}, max_new_tokens=12)
    ids = {answer["meta_info"]["id"] for answer in answers}
    assert len(ids) == 4
    assert "many" not in ids
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4


async def test_a_sampling_seed_repeats_and_greedy_is_deterministic(client: EngineClient) -> None:
    seeded = [await client.generate(params={"sampling_seed": 11}, max_new_tokens=20) for _ in range(2)]
    assert seeded[0]["output_ids"] == seeded[1]["output_ids"]
    free = [await client.generate(max_new_tokens=20) for _ in range(2)]
    assert free[0]["output_ids"] != free[1]["output_ids"]
    greedy = [await client.generate(params={"temperature": 0}, max_new_tokens=20) for _ in range(2)]
    assert greedy[0]["output_ids"] == greedy[1]["output_ids"]


def test_the_same_calls_to_a_server_of_the_same_seed_draw_the_same() -> None:
    def seeds(random_seed: int) -> list[int]:
        reader = CallReader(Limits(64, 512, frozenset(), 1, random_seed), None)
        calls = [reader.read(b'{"input_ids": [[3], [4]], "sampling_params": {"n": 2}}') for _ in range(2)]
        return [job.request.seed for call in calls for job in call.jobs]

    assert seeds(1) == seeds(1)
    assert len(set(seeds(1) + seeds(2))) == 16


async def test_text_prompts_are_tokenized(client: EngineClient) -> None:
    answer = await client.generate(text="bcd", return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == [3, 4, 5]
    batch = await client.generate(text=["b", "cd"], return_prompt_token_ids=True)
    assert [each["prompt_token_ids"] for each in batch] == [[3], [4, 5]]


async def test_a_stop_text_ends_the_output_and_is_trimmed(client: EngineClient) -> None:
    params: dict[str, Any] = {"sampling_seed": 5}
    free = await client.generate(params=params, max_new_tokens=30)
    stop = free["text"][9:12]
    end = free["text"].index(stop)
    stopped = await client.generate(params=params | {"stop": [stop, "??"]}, max_new_tokens=30)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][:end]
    assert stopped["output_ids"] == free["output_ids"][: len(stopped["output_ids"])]
    kept = await client.generate(params=params | {"stop": stop, "no_stop_trim": True}, max_new_tokens=30)
    assert kept["text"] == free["text"][: end + 3]


async def test_an_empty_stop_text_ends_the_output_at_its_first_token(client: EngineClient) -> None:
    """As SGLang 0.5.23 does, which searches the text for it: the contract is in tests/sglang/test_answers.py."""
    for stop in ("", ["zzzz", ""]):
        for kept in (False, True):
            answer = await client.generate(params={"stop": stop, "no_stop_trim": kept}, max_new_tokens=16)
            assert (len(answer["output_ids"]), answer["text"]) == (1, "")
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}


async def test_a_stop_text_counts_before_the_least_number_of_tokens(client: EngineClient) -> None:
    params: dict[str, Any] = {"sampling_seed": 5}
    free = await client.generate(params=params, max_new_tokens=16)
    wanted = params | {"stop": [free["text"][2]], "min_new_tokens": 16}
    stopped = await client.generate(params=wanted, max_new_tokens=16)
    assert len(stopped["output_ids"]) == free["text"].index(free["text"][2]) + 1


async def test_a_stop_token_is_in_the_output_and_trimmed_from_the_text(client: EngineClient) -> None:
    params: dict[str, Any] = {"sampling_seed": 6}
    free = await client.generate(params=params, max_new_tokens=30)
    stop = next(token for token in free["output_ids"] if token > 1)
    length = free["output_ids"].index(stop) + 1
    wanted = params | {"stop_token_ids": [stop], "ignore_eos": False}
    stopped = await client.generate(params=wanted, max_new_tokens=30)
    assert stopped["output_ids"] == free["output_ids"][:length]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(stopped["meta_info"]["output_token_logprobs"]) == length
    kept = await client.generate(params=wanted | {"no_stop_trim": True}, max_new_tokens=30)
    assert kept["text"] == stopped["text"] + CHARACTERS[stop - 2]


async def test_end_of_text_stops_unless_ignored(client: EngineClient) -> None:
    prompts = [PROMPT] * 64
    stopped = await client.generate(input_ids=prompts, max_new_tokens=60, params={"ignore_eos": False})
    ended = [answer for answer in stopped if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for answer in ended:
        assert answer["output_ids"][-1] == answer["meta_info"]["finish_reason"]["matched"] == 1
        assert 1 not in answer["output_ids"][:-1]
    ignoring = await client.generate(input_ids=prompts, max_new_tokens=60)
    assert any(1 in answer["output_ids"] for answer in ignoring)
    assert all(len(answer["output_ids"]) == 60 for answer in ignoring)
    special = next(answer for answer in ignoring if 1 in answer["output_ids"])
    assert "<eos>" not in special["text"]
    shown = await client.generate(input_ids=prompts, max_new_tokens=60, params={"skip_special_tokens": False})
    assert any("<eos>" in answer["text"] for answer in shown)


async def test_chunks_of_a_stream_are_cumulative(client: EngineClient) -> None:
    chunks = [chunk async for chunk in client.stream(max_new_tokens=40, params={"stream_interval": 10})]
    whole = chunks[-1]
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert whole["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 40}]
    for chunk in chunks:
        length = chunk["meta_info"]["completion_tokens"]
        assert chunk["output_ids"] == whole["output_ids"][:length]
        assert chunk["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:length]
        assert whole["text"].startswith(chunk["text"])
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


async def test_chunks_of_a_streamed_batch_name_their_index(client: EngineClient) -> None:
    last: dict[int, Any] = {}
    async for chunk in client.stream(input_ids=[[3], [4], [5]], rid="s", max_new_tokens=8):
        last[chunk["index"]] = chunk
    assert [last[index]["meta_info"]["id"] for index in range(3)] == ["s_0", "s_1", "s_2"]
    assert all(len(chunk["output_ids"]) == 8 for chunk in last.values())


BAD_SAMPLING = [
    ({"max_newtokens": 3}, "known: max_new_tokens, temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 510}, "maximum context length of 512 tokens"),
    ({"n": 0}, "n"),
    ({"n": 5000}, "n"),
    ({"stop_token_ids": [64]}, "stop_token_ids"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ({"regex": "a+"}, "regex is not supported"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias is not supported"),
    ({"temperature": "hot"}, "temperature"),
]


@pytest.mark.parametrize(("params", "message"), BAD_SAMPLING, ids=lambda value: str(value)[:40])
async def test_bad_sampling_params_are_refused_by_name(
    client: EngineClient, params: dict[str, Any], message: str
) -> None:
    answer = await client.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert answer.status == 400, answer.text
    assert message in answer.body["error"]["message"]


BAD_BODIES = [
    ({"input_ids": [3, 64]}, "64, out of the vocabulary"),
    ({"input_ids": [3, -1]}, "-1, out of the vocabulary"),
    ({"input_ids": []}, "at least one token"),
    ({"input_ids": [[3], []]}, "at least one token"),
    ({"input_ids": [1 << 70]}, ""),
    ({"input_ids": [3.5]}, "int"),
    ({"input_ids": "abc"}, "array"),
    ({"input_ids": [3] * 512}, "longer than the model's context length"),
    ({}, "Either text or input_ids"),
    ({"input_ids": [3], "text": "b"}, "Either text or input_ids"),
    ({"input_ids": [3], "return_logprob": True, "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
    (
        {
            "input_ids": [3, 4],
            "return_logprob": True,
            "top_logprobs_num": 65,
            "sampling_params": {"max_new_tokens": 0},
        },
        "top_logprobs_num must be in [0, 64]",
    ),
    ({"input_ids": [3], "return_hidden_states": True}, "return_hidden_states is not supported"),
    ({"input_ids": [3], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
    ({"input_ids": [[3], [4]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "Duplicate request ID"),
    ({"input_ids": [[3], [4]], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [3], "stream": "yes"}, "stream"),
    ([1, 2], "object"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES, ids=lambda value: str(value)[:40])
async def test_bad_bodies_are_refused_and_the_engine_goes_on(client: EngineClient, body: Any, message: str) -> None:
    answer = await client.post("/generate", body)
    assert answer.status == 400, answer.text
    assert message in answer.text
    assert len((await client.generate())["output_ids"]) == 6


async def test_bodies_that_are_no_json_are_refused(client: EngineClient) -> None:
    for data in (b"", b"{", b"\xff\xfe", b"null"):
        assert (await client.send("/generate", data)).status == 400
    assert (await client.get("/generate")).status == 405
    assert (await client.get("/nothing")).status == 404


async def test_unknown_fields_of_a_body_are_ignored(client: EngineClient) -> None:
    answer = await client.generate(priority=3, return_routed_experts=True, something_new={"a": 1})
    assert len(answer["output_ids"]) == 6


async def test_a_request_id_in_use_is_refused(client: EngineClient) -> None:
    await client.post("/slow_down", {"forward_sleep_time": 0.01})
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: client.generate(rid="twice", max_new_tokens=500))
        await client.until(running=1)
        answer = await client.post("/generate", generate_body(rid="twice"))
        assert answer.status == 400
        assert "Duplicate request ID detected: twice" in answer.text
        await client.post("/abort_request", {"rid": "twice"})


async def test_the_rest_of_the_context_but_two_tokens_is_the_default_limit_at_most(client: EngineClient) -> None:
    body = {"input_ids": [3] * 500, "sampling_params": {"ignore_eos": True}}
    answer = (await client.post("/generate", body)).body
    assert len(answer["output_ids"]) == 10
    body = {"input_ids": [3], "sampling_params": {"ignore_eos": True}}
    assert len((await client.post("/generate", body)).body["output_ids"]) == 128


async def test_more_requests_than_slots_are_all_answered(client: EngineClient) -> None:
    prompts = [[3 + index % 60] for index in range(200)]
    answers = await client.generate(input_ids=prompts, max_new_tokens=5)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [5] * 200


async def test_sampling_masks_are_those_of_sglang(client: EngineClient) -> None:
    params = {"top_p": 0.9, "top_k": 8, "temperature": 0.7}
    answer = await client.generate(return_sampling_mask=True, params=params)
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert meta["output_token_sampling_mask_length"] == len(ids) == len(meta["output_token_sampling_mask"])
    rows = zip(ids, meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
    for (token, mask, log_prob), (whole, _, _) in zip(rows, meta["output_token_logprobs"], strict=True):
        assert token in mask
        assert 1 <= len(set(mask)) == len(mask) <= 8
        assert whole <= log_prob <= 0
    greedy = await client.generate(return_sampling_mask=True, params={"temperature": 0})
    assert greedy["meta_info"]["output_token_sampling_mask"] == [[token] for token in greedy["output_ids"]]
    assert greedy["meta_info"]["output_token_sampling_logprobs"] == [0.0] * len(greedy["output_ids"])
    assert "output_token_sampling_mask" not in (await client.generate())["meta_info"]
    refused = await client.post("/generate", generate_body(return_sampling_mask=True))
    assert (refused.status, "finite 1 < top_k <= 4096" in refused.text) == (400, True)
