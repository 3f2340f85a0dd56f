"""Items of Codex and openai-agents become messages with their text unchanged, and answers become items and events."""

import json
from typing import Any

import pytest

from actors.sessions.dialects.reading import Asked, ParameterRefused, Problem, Turn
from actors.sessions.dialects.responses import ResponsesDialect
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRefused, TurnRequest, TurnSampling
from tests.build.turns import answer, bash_call

RESPONSES = ResponsesDialect()


def read(**fields: Any) -> Asked:
    return RESPONSES.read(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def events_of(sampled: TurnAnswer) -> list[dict[str, Any]]:
    asked, turn = read(stream=True), Turn("t", 7, (sampled,))
    stream = RESPONSES.opening(asked, turn) + b"".join(RESPONSES.events(asked, turn))
    events = list[dict[str, Any]]()
    for one in stream.decode().strip().split("\n\n"):
        name, data = one.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


def test_a_request_of_codex_is_read() -> None:
    asked = read(
        instructions="You are Codex.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": " let me \n", "annotations": []}],
            },
            {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"cmd":  "echo hi"}'},
            {"type": "function_call", "call_id": "call_2", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "hi\n"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "b"}]},
            {"type": "custom_tool_call", "call_id": "call_3", "name": "patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "call_3", "output": "ok"},
            {"type": "message", "role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "more"},
        ],
        tools=[
            {
                "type": "function",
                "name": "bash",
                "description": "runs",
                "parameters": {"type": "object"},
                "strict": False,
            },
            {"type": "web_search"},
            {"type": "namespace", "name": "multi_agent_v1", "tools": []},
        ],
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        reasoning={"summary": "auto"},
        tool_choice="auto",
        text={"verbosity": "low", "format": {"type": "text"}},
        client_metadata={"turn": "1"},
        max_output_tokens=5,
    )
    calls = (bash_call(), ToolCall("call_2", "bash", "{}"))
    request = TurnRequest(
        messages=(
            ChatMessage("system", "You are Codex."),
            ChatMessage("developer", "rules"),
            ChatMessage("user", "do it"),
            ChatMessage("assistant", " let me \n", "hm", calls),
            ChatMessage("tool", "hi\n", tool_call_id="call_1"),
            ChatMessage("tool", "b", tool_call_id="call_2"),
            ChatMessage("assistant", tool_calls=(ToolCall("call_3", "patch", "*** x"),)),
            ChatMessage("tool", "ok", tool_call_id="call_3"),
            ChatMessage("assistant", "one"),
            ChatMessage("assistant", "two"),
            ChatMessage("user", "more"),
        ),
        tools=(Tool("bash", "runs", {"type": "object"}),),
        sampling=TurnSampling(max_tokens=5),
        model="m",
    )
    assert asked == Asked(request, stream=True, dropped_tools=("web_search", "namespace"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterRefused) as refused:
        read(**fields)
    assert refused.value.param == param


def test_an_answer_that_is_sent_back_is_read_as_it_was_sampled() -> None:
    sampled = answer(" let me\n", bash_call(), bash_call(2), reasoning="hm")
    response = json.loads(RESPONSES.answer(read(), Turn("t", 7, (sampled,))))
    assert (response["id"], response["status"], response["created_at"]) == ("resp_t", "completed", 7)
    assert response["usage"]["input_tokens"] == 11
    assert response["usage"]["output_tokens"] == 3
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    sent = [{"role": "user", "content": "hi"}, *response["output"]]
    assert read(input=sent).request.messages[1:] == (sampled.message,)


def test_a_stream_has_the_events_of_each_item_in_their_order() -> None:
    events = events_of(answer("two", bash_call(), reasoning="hm"))
    text, call = "response.output_text", "response.function_call_arguments"
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] in (f"{text}.delta", f"{call}.delta")]
    assert deltas == ["two", '{"cmd":  "echo hi"}']
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


def test_an_answer_that_was_cut_is_incomplete() -> None:
    last = events_of(answer("tw", finish="length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_error_ends_a_stream_by_its_event() -> None:
    problem = Problem.of(TurnRefused("context_full", "It does not fit.", num_tokens=9, max_tokens=8))
    assert json.loads(RESPONSES.problem(problem))["error"]["code"] == "context_length_exceeded"
    name, data = RESPONSES.problem_event(problem).decode().strip().split("\n")
    assert name == "event: response.failed"
    assert json.loads(data.removeprefix("data: "))["response"]["error"]["code"] == "context_length_exceeded"
