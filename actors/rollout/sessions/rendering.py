"""Renders the prompt of a turn: the whole conversation once, later only what came after the newest sampled turn.

Tokens that were sampled are never rendered. What follows them is rendered behind a marker: (user, assistant with the
marker, what follows), cut after the token that ends the marked turn. To render with and without it and to take the
difference would be wrong: some templates write an empty thought into a last turn alone.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from actors.rollout.sessions.formats import OTHER, ChatFormat, format_of
from actors.rollout.sessions.tool_calls import OPEN_THOUGHT
from runtime.data.chat import Messages
from runtime.sessions.turns import ChatMessage, Tool, ToolCall

MARK: Final = "\ue002turn\ue002"  # characters for private use
BEFORE: Final = {"role": "user", "content": "x"}  # templates want a user's message first


class Template(Protocol):
    """A chat template, as `runtime.data.chat_template` reads it."""

    def source(self, *, tools: Any = None) -> str:
        """Return its text. Raises ValueError: the model has none."""
        ...

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render messages and the start of an answer. Raises ValueError: it refuses them."""
        ...


class Tokens(Protocol):
    """The vocabulary of the served model."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode without adding special tokens. Raises ValueError: the text cannot be encoded."""
        ...


class Prompt(NamedTuple):
    """What is rendered before a turn."""

    text: str
    ids: list[int]

    @property
    def in_thoughts(self) -> bool:
        """Whether the turn begins inside of its thoughts, since the prompt opens them."""
        return self.text.rstrip().endswith(OPEN_THOUGHT)


class Rendering:
    """Renders the prompts of one model.

    Attributes:
        format: of its template; OTHER: only `whole` can render.
    """

    def __init__(self, template: Template, tokens: Tokens) -> None:
        """Find the format of a template. Raises ValueError: the model has no template."""
        self.format: ChatFormat = format_of(template.source())
        self._template = template
        self._tokens = tokens
        self._stops = tokens.end_ids | {ids[0] for text in self.format.stops if len(ids := tokens.encode(text)) == 1}

    @property
    def renders_tails(self) -> bool:
        """Whether the end of a turn is known, so that what follows it can be rendered alone."""
        return self.format is not OTHER

    def is_ended(self, last_id: int) -> bool:
        """Whether a turn that ends with this token needs no further end."""
        return last_id in self._stops

    def whole(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Prompt:
        """Render a conversation from its beginning.

        Raises:
            ValueError: the template refuses or leaves out a message, or the text cannot be encoded.
        """
        text = self._rendered([], _merged(messages), tools)
        self._check(messages, text)
        return Prompt(text, self._tokens.encode(text))

    def tail(
        self, above: ChatMessage, last_id: int, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
    ) -> Prompt:
        """Render what follows a sampled turn.

        Args:
            above: the sampled turn.
            last_id: its last token. If that ends no turn, the prompt begins with such an end.
            messages: after it.
            tools: of the conversation.

        Raises:
            ValueError: the template refuses or leaves out a message, or the text cannot be encoded.
        """
        text = self._rendered([BEFORE, self._marked(above, messages)], messages, tools[:1])
        self._check(messages, text)
        at = text.find(MARK)
        if at < 0:
            raise ValueError("the chat template leaves out a turn of the assistant")
        text = self._cut(text[at + len(MARK) :], last_id)
        return Prompt(text, self._tokens.encode(text))

    def _cut(self, text: str, last_id: int) -> str:
        """Return what follows the marked turn, with or without its end."""
        places = [(text.find(end), end) for end in self.format.ends]
        place, end = min(((place, end) for place, end in places if place >= 0), default=(0, ""))
        text = text[place + len(end) :]
        if not self.is_ended(last_id):
            return (self.format.ends[0] if self.format.ends else "") + text
        opener = next((each for each in self.format.openers if text.startswith(each)), None)
        if opener is not None and self._tokens.encode(opener) == [last_id]:
            return text[len(opener) :]  # the turn has sampled it
        return text

    def _rendered(self, before: Messages, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        """Render messages; those that the template refuses, with calls and answers of tools as text."""
        offered = [_tool(tool) for tool in tools] or None
        is_first = not before
        try:
            plain = [self._plain(each, is_first and not place) for place, each in enumerate(messages)]
            return self._template.render([*before, *plain], tools=offered)
        except ValueError:
            if not any(each.tool_calls or each.role == "tool" for each in messages):
                raise
        as_text = [self._plain(_as_text(each), is_first and not place) for place, each in enumerate(messages)]
        return self._template.render([*before, *as_text], tools=offered)

    def _marked(self, above: ChatMessage, messages: Sequence[ChatMessage]) -> dict[str, Any]:
        """Return a turn in place of the sampled one, with the marker at its end."""
        if not self.format.names_callers or not above.tool_calls or not messages or messages[0].role != "tool":
            return {"role": "assistant", "content": MARK}
        answered = [call for call in above.tool_calls if call.id == messages[0].tool_call_id]
        call = ToolCall("call", [*answered, *above.tool_calls][0].name, json.dumps({MARK: ""}, ensure_ascii=False))
        return {"role": "assistant", "content": "", "tool_calls": [self._call(call)]}

    def _plain(self, message: ChatMessage, is_first: bool) -> dict[str, Any]:
        """Return a message as templates take it."""
        role: str = "system" if message.role == "developer" else message.role
        if role == "system" and not is_first and not self.format.system_inside:
            role = "user"
        plain: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [self._call(call) for call in message.tool_calls]
        is_given = bool(message.reasoning) and not (message.tool_calls and message.text and self.format.names_callers)
        return plain | {self.format.thoughts_key: message.reasoning} if is_given else plain

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = call.arguments
        if not self.format.arguments_as_text:
            try:
                arguments = json.loads(call.arguments or "{}")
            except (ValueError, RecursionError):
                arguments = call.arguments
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _check(self, messages: Sequence[ChatMessage], text: str) -> None:
        """Check that the template wrote the words of users and tools: many leave a role out that they do not know."""
        at = 0
        for number, message in enumerate(messages):
            words = message.text.strip()
            if message.role == "assistant":
                continue
            if (place := text.find(words, at)) >= 0:  # mostly in the order of the messages
                at = place + len(words)
            elif not any(form in text for form in _forms(words)):
                raise ValueError(f"the chat template leaves out message {number} ({message.role}): {words[:80]!r}")


def _forms(words: str) -> Iterator[str]:
    yield words
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield json.dumps(words)[1:-1]


def _merged(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation whose first system messages are one: most templates know one, at the beginning."""
    count = next((place for place, each in enumerate(messages) if each.role not in ("system", "developer")), 0)
    if count < 2:
        return list(messages)
    return [ChatMessage("system", "\n\n".join(each.text for each in messages[:count])), *messages[count:]]


def _as_text(message: ChatMessage) -> ChatMessage:
    """Return a message without calls: what it calls, or what a tool answered, is part of its words."""
    if message.role == "tool":
        return ChatMessage("user", message.text)
    if not message.tool_calls:
        return message
    calls = (
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}' for call in message.tool_calls
    )
    return ChatMessage("assistant", "\n".join(filter(None, (message.text, *calls))), message.reasoning)


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }
