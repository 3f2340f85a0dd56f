"""Bodies of clients of chat completions become turns with their text unchanged; answers have what each one reads."""

import json
from typing import Any

import pytest

from actors.sessions.dialects.chat import ChatDialect
from actors.sessions.dialects.reading import MAX_SAMPLES, Asked, ParameterRefused, Problem, Turn
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnRefused, TurnRequest, TurnSampling
from tests.build.turns import answer, bash_call

CHAT = ChatDialect()
HI = {"role": "user", "content": "hi"}


def read(**fields: Any) -> Asked:
    return CHAT.read(json.dumps({"model": "m", "messages": [HI]} | fields).encode())


def test_a_history_of_openai_agents_is_read() -> None:
    body = b"""{"model": "m", "messages": [
      {"role": "system", "content": "Be brief."},
      {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b\\n"}]},
      {"role": "user", "content": "look"},
      {"role": "assistant", "content": null, "reasoning_content": " hm\\n", "refusal": null, "token_ids": [1],
       "tool_calls": [{"id": "call_1", "type": "function",
                       "function": {"name": "bash", "arguments": "{\\"cmd\\":  \\"echo hi\\"}"}},
                      {"id": "call_2", "type": "function", "function": {"name": "bash", "arguments": {"n" : 1.0}}}]},
      {"role": "tool", "tool_call_id": "call_1", "content": "hi\\n"},
      {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "1"}]}],
      "tools": [{"type": "function", "function": {"name": "bash", "description": "runs", "strict": true,
                 "parameters": {"type": "object"}}}, {"type": "custom", "custom": {"name": "x"}}],
      "stream": true, "stream_options": {"include_usage": true}, "parallel_tool_calls": false, "user": "u"}"""
    calls = (bash_call(), ToolCall("call_2", "bash", '{"n" : 1.0}'))
    request = TurnRequest(
        messages=(
            ChatMessage("system", "Be brief."),
            ChatMessage("developer", "a\n b\n"),
            ChatMessage("user", "look"),
            ChatMessage("assistant", "", " hm\n", calls),
            ChatMessage("tool", "hi\n", tool_call_id="call_1"),
            ChatMessage("tool", "1", tool_call_id="call_2"),
        ),
        tools=(Tool("bash", "runs", {"type": "object"}),),
        model="m",
    )
    assert CHAT.read(body) == Asked(request, stream=True, with_usage=True, dropped_tools=("custom",))


def test_sampling_of_smolagents_and_inspect_ai_is_read() -> None:
    asked = read(
        stop=["Observation:", "Calling tools:"],
        tool_choice="required",
        max_completion_tokens=64,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        n=2,
        logprobs=True,
        seed=3,
        presence_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
    )
    stop = ("Observation:", "Calling tools:")
    assert asked.request.sampling == TurnSampling(temperature=0, top_p=0.5, max_tokens=64, stop=stop)
    assert asked.num_samples == 2
    assert read(stop="x", max_tokens=9).request.sampling == TurnSampling(max_tokens=9, stop=("x",))
    assert read(stop=None, max_tokens=None, n=None, tools=None, stream=None).request.sampling == TurnSampling()


def test_without_a_choice_of_tools_none_are_offered() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert read(tools=[tool], tool_choice="auto").request.tools == (Tool("f"),)
    assert read(tools=[tool], tool_choice={"type": "auto"}).request.tools == (Tool("f"),)
    assert read(tools=[tool], tool_choice="none").request.tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": MAX_SAMPLES + 1}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterRefused) as refused:
        read(**fields)
    assert refused.value.param.startswith(param)
    assert refused.value.reason.startswith(refused.value.param)
    error = json.loads(CHAT.problem(Problem.of(refused.value)))["error"]
    assert error == {
        "message": refused.value.reason,
        "type": "invalid_request_error",
        "param": refused.value.param,
        "code": None,
    }
    assert Problem.of(refused.value).status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"messages": 1e999}'])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(TurnRefused):
        CHAT.read(body)


def test_half_of_a_surrogate_pair_becomes_the_replacement_character() -> None:
    body = rb'{"messages": [{"role": "user", "content": "a\ud83d \ud83d\ude00 \\ud83d \udc00"}]}'
    assert CHAT.read(body).request.messages[0].text == "a\ufffd \U0001f600 \\ud83d \ufffd"


def test_an_answer_has_all_that_clients_read() -> None:
    asked = read(n=2)
    turn = Turn("t1", 7, (answer(" let me\n", bash_call(), reasoning="hm"), answer("x", finish="length")))
    assert json.loads(CHAT.answer(asked, turn)) == {
        "id": "chatcmpl-t1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": " let me\n",
                    "refusal": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"cmd":  "echo hi"}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "x", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 6, "total_tokens": 17},
    }


def test_an_answer_that_is_sent_back_is_read_as_it_was_sampled() -> None:
    sampled = answer(" let me\n", bash_call(), bash_call(2, '{"a": 1e3}'), reasoning="hm")
    message = json.loads(CHAT.answer(read(), Turn("t", 7, (sampled,))))["choices"][0]["message"]
    assert read(messages=[HI, message]).request.messages[1] == sampled.message


def test_a_stream_has_the_deltas_of_each_part_and_its_end() -> None:
    sampled = answer("two", bash_call(), bash_call(2), reasoning="hm")
    asked = read(stream=True, stream_options={"include_usage": True})
    events = list(CHAT.events(asked, Turn("t", 7, (sampled,))))
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [json.loads(one.removeprefix(b"data: ")) for one in events[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "chatcmpl-t" for chunk in chunks)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[:3] == [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "two"}]
    called = {"name": "bash", "arguments": '{"cmd":  "echo hi"}'}
    assert [call for delta in deltas[3:5] for call in delta["tool_calls"]] == [
        {"index": index, "id": f"call_{index + 1}", "type": "function", "function": called} for index in (0, 1)
    ]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None] * 5 + ["tool_calls"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


def test_a_full_context_has_the_code_and_words_that_clients_know() -> None:
    problem = Problem.of(TurnRefused("context_full", "The prompt does not fit.", num_tokens=90, max_tokens=64))
    error = json.loads(CHAT.problem(problem))["error"]
    assert (problem.status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 64 tokens.")
    assert "90 tokens" in error["message"]


@pytest.mark.parametrize(
    ("kind", "status"), [("unknown_key", 401), ("forbidden", 403), ("ended", 410), ("failed", 410)]
)
def test_refusals_have_a_status_that_no_client_repeats(kind: Any, status: int) -> None:
    problem = Problem.of(TurnRefused(kind, "why"))
    assert problem.status == status
    assert json.loads(CHAT.problem(problem))["error"]["message"] == "why"
    assert CHAT.problem_event(problem) == b"data: " + CHAT.problem(problem) + b"\n\n"
