"""Anthropic's messages, as its SDK and Claude Code use them."""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from actors.sessions.dialects.chat import tools_wanted
from actors.sessions.dialects.reading import (
    BILLING,
    Asked,
    Content,
    Count,
    Neutral,
    ParameterRefused,
    Problem,
    Stops,
    Temperature,
    TopK,
    TopP,
    Turn,
    decode,
    event,
    not_empty,
    object_of,
    refuse_others,
    shown,
    text_of,
    top_k_of,
)
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRequest, TurnSampling

PING: Final = event({"type": "ping"}, "ping")
SIGNATURE: Final = "none"  # of thoughts; a client sends it back unread, and wants some text
STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
TYPES: Final = {401: "authentication_error", 403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
CUSTOM: Final = (None, "custom")  # types of tools that the client runs, by a schema of its own


class _Block(Struct):
    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw(b"{}")
    tool_use_id: str | None = None
    content: Content = None


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _OutputConfig(Struct):
    format: dict[str, Any] | None = None


class _Counted(Struct):
    """A request to count tokens, which needs no limit."""

    messages: list[_Message]
    model: str = ""
    max_tokens: Count | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    output_config: _OutputConfig | None = None
    output_format: Any = None
    mcp_servers: Any = None


NEUTRAL: Final[Neutral] = {"output_format": ({"type": "text"},), "mcp_servers": ([],)}


class MessagesDialect:
    """Requests and answers of POST /v1/messages."""

    def read(self, body: bytes) -> Asked:
        """Read a request."""
        asked = self.read_counted(body)
        if asked.request.sampling.max_tokens is None:
            raise ParameterRefused("max_tokens", "it is needed")
        return asked

    def read_counted(self, body: bytes) -> Asked:
        """Read a request of POST /v1/messages/count_tokens."""
        asked = decode(body, _Counted)
        refuse_others(asked, NEUTRAL)
        if asked.output_config and asked.output_config.format is not None:
            raise ParameterRefused("output_config.format", f"{shown(asked.output_config.format)} is not served")
        messages = list(_system(asked.system))
        for index, message in enumerate(asked.messages):
            messages += _messages(message, f"messages[{index}].content")
        sampling = TurnSampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=top_k_of(asked.top_k),
            max_tokens=asked.max_tokens,
            stop=tuple(asked.stop_sequences or ()),
        )
        tools = [tool for tool in asked.tools or () if tool.type in CUSTOM]
        dropped = tuple(tool.type or "" for tool in asked.tools or () if tool.type not in CUSTOM)
        offered = [Tool(tool.name, tool.description or "", tool.input_schema or {}) for tool in tools]
        request = TurnRequest(
            messages=not_empty(messages),
            tools=tuple(offered) if tools_wanted(asked.tool_choice, "any") else (),
            sampling=sampling,
            model=asked.model,
        )
        return Asked(request, stream=bool(asked.stream), dropped_tools=dropped)

    def answer(self, asked: Asked, turn: Turn) -> bytes:
        """Return the body of an answer."""
        answer = turn.answers[0]
        content = _message(asked, turn, len(answer.token_ids))
        end = {"content": _blocks(answer), "stop_reason": STOP_REASONS[answer.finish]}
        return msgspec.json.encode(content | end)

    def opening(self, asked: Asked, turn: Turn) -> bytes:
        """Return nothing: a stream begins with the tokens of its prompt, which are not counted yet."""
        return b""

    def hold(self, asked: Asked, turn: Turn) -> bytes:
        """Return a ping."""
        return PING

    def events(self, asked: Asked, turn: Turn) -> Iterator[bytes]:
        """Return the events of each block, and the end of the message."""
        answer = turn.answers[0]
        yield event({"type": "message_start", "message": _message(asked, turn)}, "message_start")
        for index, block in enumerate(_blocks(answer)):
            for name, content in _block_events(block):
                yield event({"type": name, "index": index, **content}, name)
        delta = {"stop_reason": STOP_REASONS[answer.finish], "stop_sequence": None}
        usage = {"output_tokens": len(answer.token_ids)}
        yield event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def problem(self, problem: Problem) -> bytes:
        """Return the body of an error."""
        return msgspec.json.encode(_error(problem))

    def problem_event(self, problem: Problem) -> bytes:
        """Return the event that ends a stream with an error."""
        return event(_error(problem), "error")


def _error(problem: Problem) -> dict[str, Any]:
    message = problem.reason
    if problem.is_full:  # clients offer compaction on these words
        message = f"prompt is too long: {problem.num_tokens} tokens > {problem.max_tokens} maximum"
    kind = TYPES.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _system(system: str | list[_Block] | None) -> Iterator[ChatMessage]:
    blocks = [_Block(text=system)] if isinstance(system, str) else system or []
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(blocks)]
    kept = [text for text in texts if text and not text.startswith(BILLING)]
    if kept:
        yield ChatMessage("system", "\n".join(kept))


def _messages(message: _Message, where: str) -> Iterator[ChatMessage]:
    """Return an assistant message, or each run of text and each tool's result of another one, in their order."""
    blocks = [_Block(text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks, where)
        return
    texts = list[str]()
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(block, f"{where}[{index}]"))
            continue
        if texts:
            yield ChatMessage(message.role, "\n".join(texts))
            texts = []
        text = text_of(block.content, f"{where}[{index}].content")
        yield ChatMessage("tool", text, tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield ChatMessage(message.role, "\n".join(texts))


def _assistant(blocks: list[_Block], where: str) -> ChatMessage:
    text, thoughts, calls = "", list[str](), list[ToolCall]()
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(ToolCall(block.id or "", block.name or "", bytes(block.input).decode()))
        elif block.type != "redacted_thinking":
            text += _text(block, f"{where}[{index}]")
    return ChatMessage("assistant", text, "\n".join(thoughts) if thoughts else None, tuple(calls))


def _text(block: _Block, where: str) -> str:
    if block.type != "text":
        raise ParameterRefused(where, f"a block of type {shown(block.type)} is not served here")
    return block.text or ""


def _message(asked: Asked, turn: Turn, num_sampled: int = 0) -> dict[str, Any]:
    """Return a message without its content."""
    usage = {
        "input_tokens": turn.answers[0].num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _blocks(answer: TurnAnswer) -> list[dict[str, Any]]:
    message, blocks = answer.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": object_of(call)})
    return blocks


def _block_events(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    empty: dict[str, Any]
    match block["type"]:
        case "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "text":
            empty, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}]
    yield "content_block_start", {"content_block": empty}
    for delta in deltas:
        yield "content_block_delta", {"delta": delta}
    yield "content_block_stop", {}
