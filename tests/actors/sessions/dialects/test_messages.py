"""Bodies of Claude Code and Anthropic's SDK become turns, and answers become blocks and the events that they need."""

import json
from typing import Any

import pytest

from actors.sessions.dialects.messages import MessagesDialect
from actors.sessions.dialects.reading import Asked, ParameterRefused, Problem, Turn
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRefused, TurnRequest, TurnSampling
from tests.build.turns import answer, bash_call

MESSAGES = MessagesDialect()
HI = {"role": "user", "content": "hi"}


def read(**fields: Any) -> Asked:
    return MESSAGES.read(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI]} | fields).encode())


def events_of(sampled: TurnAnswer) -> list[dict[str, Any]]:
    stream = b"".join(MESSAGES.events(read(stream=True), Turn("t", 7, (sampled,))))
    events = list[dict[str, Any]]()
    for one in stream.decode().strip().split("\n\n"):
        name, data = one.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


def test_a_request_of_claude_code_is_read() -> None:
    body = b"""{"model": "m", "max_tokens": 32000, "stream": true,
      "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197"},
                 {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
                 {"type": "text", "text": "Be brief."}],
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<r>"},
                                     {"type": "text", "text": "do it", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "reminder"},
        {"role": "assistant", "content": [
          {"type": "thinking", "thinking": "hm", "signature": "none"},
          {"type": "redacted_thinking", "data": "x"},
          {"type": "text", "text": " let me "},
          {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"command":"echo hi",  "n": 5000.0}}]},
        {"role": "user", "content": [
          {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "hi\\n"}]},
          {"type": "text", "text": "go on"},
          {"type": "tool_result", "tool_use_id": "call_2", "content": "late", "is_error": true}]}],
      "tools": [{"name": "bash", "description": "runs", "input_schema": {"type": "object"}, "strict": true},
                {"type": "web_search_20250305", "name": "web_search"}],
      "thinking": {"type": "adaptive"}, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
      "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}, "temperature": 1, "stop_sequences": ["x"]}"""
    request = TurnRequest(
        messages=(
            ChatMessage("system", "You are Claude Code.\nBe brief."),
            ChatMessage("user", "<r>\ndo it"),
            ChatMessage("system", "reminder"),
            ChatMessage(
                "assistant",
                " let me ",
                "hm",
                (ToolCall("call_1", "bash", '{"command":"echo hi",  "n": 5000.0}'),),
            ),
            ChatMessage("tool", "hi\n", tool_call_id="call_1"),
            ChatMessage("user", "go on"),
            ChatMessage("tool", "late", tool_call_id="call_2"),
        ),
        tools=(Tool("bash", "runs", {"type": "object"}),),
        sampling=TurnSampling(temperature=1, max_tokens=32000, stop=("x",)),
        model="m",
    )
    assert MESSAGES.read(body) == Asked(request, stream=True, dropped_tools=("web_search_20250305",))


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"model": "m", "messages": [HI]}).encode()
    assert MESSAGES.read_counted(body).request == TurnRequest((ChatMessage("user", "hi"),), model="m")
    with pytest.raises(ParameterRefused, match="max_tokens"):
        MESSAGES.read(body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0]"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterRefused) as refused:
        read(**fields)
    assert refused.value.param == param
    assert json.loads(MESSAGES.problem(Problem.of(refused.value)))["error"]["type"] == "invalid_request_error"


def test_choices_of_tools() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    for kind in ("auto", "any"):
        assert read(tools=tools, tool_choice={"type": kind, "disable_parallel_tool_use": True}).request.tools
    assert read(tools=tools, tool_choice={"type": "none"}).request.tools == ()


def test_an_answer_that_is_sent_back_is_read_as_it_was_sampled() -> None:
    sampled = answer(" let me\n", bash_call(), reasoning="hm")
    message = json.loads(MESSAGES.answer(read(), Turn("t", 7, (sampled,))))
    assert (message["id"], message["stop_reason"]) == ("msg_t", "tool_use")
    assert message["usage"]["input_tokens"] == 11
    assert message["usage"]["output_tokens"] == 3
    sent = read(messages=[HI, {"role": "assistant", "content": message["content"]}]).request.messages[1]
    assert sent.tool_calls[0].arguments == '{"cmd": "echo hi"}'  # json.dumps wrote it anew, as clients do
    assert (sent.text, sent.reasoning, sent.tool_calls[0].id) == (" let me\n", "hm", "call_1")


def test_a_stream_has_what_the_sdk_needs() -> None:
    events = events_of(answer("two", bash_call(), reasoning="hm"))
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 11
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "none"},
        {"type": "text_delta", "text": "two"},
        {"type": "input_json_delta", "partial_json": '{"cmd":  "echo hi"}'},
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {"output_tokens": 3}


@pytest.mark.parametrize("arguments", ["[1]", "{", "", "1"])
def test_arguments_that_are_no_object_become_one(arguments: str) -> None:
    message = json.loads(MESSAGES.answer(read(), Turn("t", 7, (answer("", bash_call(1, arguments)),))))
    assert message["content"] == [
        {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"arguments": arguments}}
    ]


@pytest.mark.parametrize(("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_an_answer_without_calls_has_a_text_and_its_reason(finish: Any, reason: str) -> None:
    message = json.loads(MESSAGES.answer(read(), Turn("t", 7, (answer(finish=finish),))))
    assert message["content"] == [{"type": "text", "text": ""}]
    assert message["stop_reason"] == reason


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (Problem.of(TurnRefused("unknown_key", "why")), "authentication_error"),
        (Problem.of(TurnRefused("forbidden", "why")), "permission_error"),
        (Problem.of(TurnRefused("ended", "why")), "invalid_request_error"),
        (Problem(413, "why"), "request_too_large"),
        (Problem(503, "why", retry=True), "overloaded_error"),
    ],
)
def test_errors_have_the_form_of_this_api(problem: Problem, kind: str) -> None:
    body = MESSAGES.problem(problem)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": None}
    assert MESSAGES.problem_event(problem) == b"event: error\ndata: " + body + b"\n\n"


def test_a_full_context_has_the_words_on_which_clients_offer_compaction() -> None:
    problem = Problem.of(TurnRefused("context_full", "It does not fit.", num_tokens=90, max_tokens=64))
    error = json.loads(MESSAGES.problem(problem))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 90 tokens > 64 maximum"}
