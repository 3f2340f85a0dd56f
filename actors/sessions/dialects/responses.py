"""OpenAI's responses, as Codex and openai-agents use them: each request has the whole history as items.

An assistant message of the tree is several items here: a reasoning item, a message, and calls of functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from actors.sessions.dialects.chat import openai_error, tools_wanted
from actors.sessions.dialects.reading import (
    Asked,
    Content,
    Count,
    Neutral,
    ParameterRefused,
    Part,
    Problem,
    Temperature,
    TopP,
    Turn,
    decode,
    event,
    not_empty,
    refuse_others,
    shown,
    text_of,
)
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRequest, TurnSampling


class _Item(Struct):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content = None


class _Tool(Struct):
    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(Struct):
    format: dict[str, Any] | None = None


class _Body(Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: _Text | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None


NEUTRAL: Final[Neutral] = {"previous_response_id": (), "conversation": (), "background": (False,), "prompt": ()}
CALLS: Final = ("function_call", "custom_tool_call")
OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")


class ResponsesDialect:
    """Requests and answers of POST /v1/responses."""

    def read(self, body: bytes) -> Asked:
        """Read a request."""
        asked = decode(body, _Body)
        refuse_others(asked, NEUTRAL)
        if asked.text and asked.text.format and asked.text.format.get("type") != "text":
            raise ParameterRefused("text.format", f"{shown(asked.text.format)} is not served; leave it out")
        items = [_Item(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
        messages = [ChatMessage("system", asked.instructions)] if asked.instructions else []
        messages += _messages(items)
        tools, dropped = _tools(asked)
        sampling = TurnSampling(temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_output_tokens)
        request = TurnRequest(messages=not_empty(messages), tools=tools, sampling=sampling, model=asked.model)
        return Asked(request, stream=bool(asked.stream), dropped_tools=dropped)

    def answer(self, asked: Asked, turn: Turn) -> bytes:
        """Return the body of an answer."""
        return msgspec.json.encode(_response(asked, turn))

    def opening(self, asked: Asked, turn: Turn) -> bytes:
        """Return the event that has to come first, and one that may come again."""
        created = {"type": "response.created", "sequence_number": 0, "response": _response(asked, _begun(turn))}
        return event(created, "response.created") + self.hold(asked, turn)

    def hold(self, asked: Asked, turn: Turn) -> bytes:
        """Return an event that says that the turn goes on. Codex would end a stream that has comments alone."""
        going = {"type": "response.in_progress", "sequence_number": 1, "response": _response(asked, _begun(turn))}
        return event(going, "response.in_progress")

    def events(self, asked: Asked, turn: Turn) -> Iterator[bytes]:
        """Return the events of each item, and the end of the stream."""
        response = _response(asked, turn)
        contents = [part for index, item in enumerate(response["output"]) for part in _item_events(item, index)]
        name = f"response.{response['status']}"
        for number, content in enumerate([*contents, {"type": name, "response": response}], 2):
            yield event(content | {"sequence_number": number}, str(content["type"]))

    def problem(self, problem: Problem) -> bytes:
        """Return the body of an error."""
        return msgspec.json.encode(openai_error(problem))

    def problem_event(self, problem: Problem) -> bytes:
        """Return the event that ends a stream."""
        error = openai_error(problem)["error"]
        failed: dict[str, Any] = {"id": "", "object": "response", "status": "failed", "error": error, "output": []}
        return event({"type": "response.failed", "sequence_number": 2, "response": failed}, "response.failed")


def _tools(asked: _Body) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Return the functions that the model is offered, and the kinds of tools that the vendor's server would run."""
    offered, dropped = list[Tool](), list[str]()
    for index, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            dropped.append(tool.type)
        elif tool.name is None:
            raise ParameterRefused(f"tools[{index}].name", "it is needed")
        else:
            offered.append(Tool(tool.name, tool.description or "", tool.parameters or {}))
    return tuple(offered) if tools_wanted(asked.tool_choice, "required") else (), tuple(dropped)


def _messages(items: Sequence[_Item]) -> list[ChatMessage]:
    """Join the items of each assistant message: its thoughts, then its text, then its calls."""
    messages = list[ChatMessage]()
    pending: ChatMessage | None = None  # an assistant message that more items may belong to
    for index, item in enumerate(items):
        where = f"input[{index}]"
        part = _assistant_part(item, where)
        if part is not None and pending is not None and _goes_on(pending, part):
            pending = ChatMessage(
                "assistant", pending.text + part.text, pending.reasoning, pending.tool_calls + part.tool_calls
            )
            continue
        if pending is not None:
            messages.append(pending)
        pending = part
        if part is None:
            messages.append(_other_message(item, where))
    return messages if pending is None else [*messages, pending]


def _goes_on(message: ChatMessage, part: ChatMessage) -> bool:
    """Whether a part belongs to the message before it."""
    if part.tool_calls:
        return True
    return part.reasoning is None and not message.tool_calls and not message.text


def _assistant_part(item: _Item, where: str) -> ChatMessage | None:
    if item.type == "reasoning":
        said = item.content or item.summary
        return ChatMessage("assistant", reasoning=text_of(said, f"{where}.content") if said else None)
    if item.type in CALLS:
        if item.name is None:
            raise ParameterRefused(f"{where}.name", "it is needed")
        arguments = item.arguments if item.arguments is not None else item.input
        return ChatMessage("assistant", tool_calls=(ToolCall(item.call_id or "", item.name, arguments or "{}"),))
    if item.type == "message" and item.role == "assistant":
        return ChatMessage("assistant", text_of(item.content, f"{where}.content", ""))
    return None


def _other_message(item: _Item, where: str) -> ChatMessage:
    if item.type in OUTPUTS:
        return ChatMessage("tool", text_of(item.output, f"{where}.output"), tool_call_id=item.call_id)
    if item.type != "message":
        raise ParameterRefused(f"{where}.type", f"an item of type {shown(item.type)} is not served")
    if item.role is None:
        raise ParameterRefused(f"{where}.role", "it is needed")
    return ChatMessage(item.role, text_of(item.content, f"{where}.content"))


def _begun(turn: Turn) -> Turn:
    return turn._replace(answers=())


def _response(asked: Asked, turn: Turn) -> dict[str, Any]:
    answer = turn.answers[0] if turn.answers else None
    is_cut = answer is not None and answer.finish == "length"
    status = "in_progress" if answer is None else "incomplete" if is_cut else "completed"
    sampling = asked.request.sampling
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "max_output_tokens": sampling.max_tokens,
        "metadata": {},
        "model": asked.request.model,
        "output": [] if answer is None else list(_items(answer, turn.id)),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None if answer is None else _usage(answer),
    }


def _usage(answer: TurnAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(answer.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + len(answer.token_ids),
    }


def _items(answer: TurnAnswer, turn_id: str) -> Iterator[dict[str, Any]]:
    message = answer.message
    status = "incomplete" if answer.finish == "length" else "completed"
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        yield {"id": f"rs_{turn_id}", "type": "reasoning", "summary": summary, "encrypted_content": None}
    if message.text or not message.tool_calls:
        content: list[dict[str, Any]] = [
            {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        ]
        yield {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "status": status, "content": content}
    for index, call in enumerate(message.tool_calls):
        yield {
            "id": f"fc_{turn_id}_{index}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    empty = {**item, "status": "in_progress"} if "status" in item else dict(item)
    match item["type"]:
        case "reasoning":
            empty["summary"], between = [], _reasoning_events(item["summary"][0])
        case "message":
            empty["content"], between = [], _text_events(item["content"][0])
        case _:
            empty["arguments"], between = "", _call_events(item)
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    for content in between:
        yield {"item_id": item["id"], "output_index": index, **content}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _reasoning_events(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text, place = part["text"], {"summary_index": 0}
    yield {"type": "response.reasoning_summary_part.added", "part": {**part, "text": ""}, **place}
    yield {"type": "response.reasoning_summary_text.delta", "delta": text, **place}
    yield {"type": "response.reasoning_summary_text.done", "text": text, **place}
    yield {"type": "response.reasoning_summary_part.done", "part": part, **place}


def _text_events(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text, place = part["text"], {"content_index": 0}
    yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **place}
    if text:
        yield {"type": "response.output_text.delta", "delta": text, "logprobs": [], **place}
    yield {"type": "response.output_text.done", "text": text, "logprobs": [], **place}
    yield {"type": "response.content_part.done", "part": part, **place}


def _call_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"]}
