"""OpenAI's chat completions, as the SDK, openai-agents, mini-swe-agent, smolagents and inspect-ai use them."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from actors.sessions.dialects.reading import (
    MAX_SAMPLES,
    Asked,
    Content,
    Count,
    Neutral,
    ParameterRefused,
    Problem,
    Stop,
    Stops,
    Temperature,
    TopK,
    TopP,
    Turn,
    decode,
    event,
    not_empty,
    raw_text,
    refuse_others,
    shown,
    text_of,
    top_k_of,
)
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRequest, TurnSampling

HOLD: Final = b": held\n\n"
DONE: Final = b"data: [DONE]\n\n"
TYPES: Final = {401: "authentication_error", 403: "permission_error", 503: "server_error"}  # of errors
CODES: Final = {401: "invalid_api_key", 403: "forbidden", 410: "session_ended", 503: "unavailable"}


class _Function(Struct):
    name: str
    arguments: Raw = Raw(b"{}")


class _Call(Struct):
    function: _Function | None = None
    id: str | None = None
    type: str | None = None


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Signature(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    type: str = "function"
    function: _Signature | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Body(Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: Stop | Stops | None = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    response_format: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    chat_template_kwargs: Any = None


NEUTRAL: Final[Neutral] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
}


class ChatDialect:
    """Requests and answers of POST /v1/chat/completions."""

    def read(self, body: bytes) -> Asked:
        """Read a request."""
        asked = decode(body, _Body)
        refuse_others(asked, NEUTRAL)
        tools, dropped = _tools(asked)
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        sampling = TurnSampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=top_k_of(asked.top_k),
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            stop=stop,
        )
        messages = not_empty([_message(one, index) for index, one in enumerate(asked.messages)])
        return Asked(
            TurnRequest(messages=messages, tools=tools, sampling=sampling, model=asked.model),
            stream=bool(asked.stream),
            num_samples=asked.n or 1,
            with_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            dropped_tools=dropped,
        )

    def answer(self, asked: Asked, turn: Turn) -> bytes:
        """Return the body of an answer."""
        choices = [
            {"index": index, "message": _written(one), "logprobs": None, "finish_reason": one.finish}
            for index, one in enumerate(turn.answers)
        ]
        content = _head(asked, turn, "chat.completion") | {"choices": choices, "usage": _usage(turn)}
        return msgspec.json.encode(content)

    def opening(self, asked: Asked, turn: Turn) -> bytes:
        """Return nothing: a stream begins with the role of its message."""
        return b""

    def hold(self, asked: Asked, turn: Turn) -> bytes:
        """Return a comment."""
        return HOLD

    def events(self, asked: Asked, turn: Turn) -> Iterator[bytes]:
        """Return chunks, each with one kind of change, and the end of the stream."""
        head = _head(asked, turn, "chat.completion.chunk")
        usage = {"usage": None} if asked.with_usage else {}
        for index, answer in enumerate(turn.answers):
            for delta, finish in _deltas(answer):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
                yield event(head | {"choices": [choice]} | usage)
        if asked.with_usage:
            yield event(head | {"choices": [], "usage": _usage(turn)})
        yield DONE

    def problem(self, problem: Problem) -> bytes:
        """Return the body of an error."""
        return msgspec.json.encode(openai_error(problem))

    def problem_event(self, problem: Problem) -> bytes:
        """Return the event that ends a stream. No [DONE] follows, which would make it look complete."""
        return event(openai_error(problem))


def openai_error(problem: Problem) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind, code = TYPES.get(problem.status, "invalid_request_error"), CODES.get(problem.status)
    message = problem.reason
    if problem.is_full:
        code = "context_length_exceeded"
        message = (  # litellm knows it by the first words
            f"This model's maximum context length is {problem.max_tokens} tokens. However, your messages resulted in "
            f"{problem.num_tokens} tokens. {problem.reason}"
        )
    return {"error": {"message": message, "type": kind, "param": problem.param or None, "code": code}}


def tools_wanted(choice: str | dict[str, Any] | None, any_name: str) -> bool:
    """Whether the model is offered the tools of a request.

    Args:
        choice: the client's `tool_choice`.
        any_name: how this dialect names the wish for any call; the model is offered the tools, and not made to call.

    Raises:
        ParameterRefused: one tool is forced.
    """
    if isinstance(choice, dict):
        choice = choice.get("type") if choice.get("type") in ("auto", any_name, "none") else choice
    if choice not in (None, "auto", any_name, "none"):
        allowed = f'"auto", "{any_name}" and "none" are'
        raise ParameterRefused("tool_choice", f"{shown(choice)} is not served, as nothing forces the model; {allowed}")
    return choice != "none"


def _tools(asked: _Body) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    offered, dropped = list[Tool](), list[str]()
    for index, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            dropped.append(tool.type)
        elif tool.function is None:
            raise ParameterRefused(f"tools[{index}].function", "it is needed")
        else:
            one = tool.function
            offered.append(Tool(one.name, one.description or "", one.parameters or {}))
    return tuple(offered) if tools_wanted(asked.tool_choice, "required") else (), tuple(dropped)


def _message(message: _Message, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    is_assistant = message.role == "assistant"
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    calls = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls or ())]
    return ChatMessage(
        role=message.role,
        text=text_of(message.content, f"{where}.content", "" if is_assistant else "\n"),
        reasoning=reasoning if is_assistant else None,
        tool_calls=tuple(calls) if is_assistant else (),
        tool_call_id=message.tool_call_id if message.role == "tool" else None,
    )


def _call(call: _Call, where: str) -> ToolCall:
    if call.function is None:
        raise ParameterRefused(where, f"a call of type {shown(call.type)} is not served; those of functions are")
    return ToolCall(call.id or "", call.function.name, raw_text(call.function.arguments))


def _head(asked: Asked, turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": asked.request.model}


def _usage(turn: Turn) -> dict[str, Any]:
    prompt = turn.answers[0].num_prompt_tokens
    sampled = sum(len(answer.token_ids) for answer in turn.answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _called(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _written(answer: TurnAnswer) -> dict[str, Any]:
    message = answer.message
    text = message.text or (None if message.tool_calls else "")
    written: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [_called(call) for call in message.tool_calls]
    return written


def _deltas(answer: TurnAnswer) -> Iterator[tuple[dict[str, Any], str | None]]:
    message = answer.message
    yield {"role": "assistant", "content": None if message.tool_calls and not message.text else ""}, None
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}, None
    if message.text:
        yield {"content": message.text}, None
    for index, call in enumerate(message.tool_calls):
        yield {"tool_calls": [{"index": index, **_called(call)}]}, None
    yield {}, answer.finish
