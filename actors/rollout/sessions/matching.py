"""Compares messages by meaning: a client sends a recorded message back in its own writing. Pure.

Clients strip or add white space, drop thoughts, reorder the keys of arguments and write numbers anew. JavaScript knows
doubles alone, so 5000.0 comes back as 5000. None of this changes what the message says.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from runtime.sessions.turns import ChatMessage, ToolCall

Difference = Literal["arguments", "thoughts", "text"]
Ids = Mapping[str, str]  # a client's own ids of tool calls, and ours
NO_IDS: Final[Ids] = {}


class Meaning:
    """A message, and what it says whatever its writing; computed once, and only if it is needed."""

    __slots__ = ("_arguments", "_text", "message")

    def __init__(self, message: ChatMessage) -> None:
        self.message = message
        self._text: str | None = None
        self._arguments: dict[str, str] | None = None

    @property
    def role(self) -> str:
        """Who speaks; `developer` is the newer word for `system`."""
        return "system" if self.message.role == "developer" else self.message.role

    @property
    def text(self) -> str:
        """The words, composed as NFC says and without white space around them."""
        if self._text is None:
            self._text = said(self.message.text)
        return self._text

    def arguments(self, call: ToolCall) -> str:
        """Return what the arguments of one of its calls say."""
        if self._arguments is None:
            self._arguments = {}
        found = self._arguments.get(call.arguments)
        if found is None:
            found = self._arguments[call.arguments] = arguments_said(call.arguments)
        return found


def said(text: str) -> str:
    """Return a text composed as NFC says and without white space around it."""
    return unicodedata.normalize("NFC", text).strip()


def arguments_said(text: str) -> str:
    """Return arguments as one text for all writings of the same values: sorted keys, numbers as doubles.

    A text that is not JSON stands for itself, and no text for no arguments.
    """
    try:
        value = json.loads(text or "{}", parse_int=_number, parse_float=_number, object_pairs_hook=_composed)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return said(text)


def _number(text: str) -> float:
    return float(text) + 0.0  # -0.0 becomes 0.0; a number too large for a double becomes infinity


def _composed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {unicodedata.normalize("NFC", key): _composed_value(value) for key, value in pairs}


def _composed_value(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    return [_composed_value(each) for each in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def difference(recorded: Meaning, sent: Meaning, ids: Ids = NO_IDS) -> Difference | None:
    """Return in what a sent message says something else than a recorded one; None: in nothing.

    Thoughts count only if the client sent some: many clients drop them.

    Args:
        recorded: a message of the tree.
        sent: a message of a request.
        ids: the client's own ids of earlier tool calls, and ours.
    """
    ours, theirs = recorded.message, sent.message
    if ours == theirs:
        return None
    if recorded.role != sent.role or len(ours.tool_calls) != len(theirs.tool_calls) or recorded.text != sent.text:
        return "text"
    if ours.tool_call_id != theirs.tool_call_id and None not in (ours.tool_call_id, theirs.tool_call_id):
        if ours.tool_call_id != ids.get(theirs.tool_call_id or ""):
            return "text"
    for mine, other in paired(ours, theirs):
        if mine.name != other.name:
            return "text"
        if mine.arguments != other.arguments and recorded.arguments(mine) != sent.arguments(other):
            return "arguments"
    if theirs.reasoning is not None and said(ours.reasoning or "") != said(theirs.reasoning):
        return "thoughts"
    return None


def paired(recorded: ChatMessage, sent: ChatMessage) -> Iterator[tuple[ToolCall, ToolCall]]:
    """Yield the calls of two messages with as many calls: by their ids, or by their places if the ids differ."""
    by_id = {call.id: call for call in sent.tool_calls}
    if by_id.keys() == {call.id for call in recorded.tool_calls}:
        yield from ((call, by_id[call.id]) for call in recorded.tool_calls)
    else:
        yield from zip(recorded.tool_calls, sent.tool_calls, strict=True)


def exactness(recorded: ChatMessage, sent: ChatMessage) -> int:
    """Return how far two messages that say the same are also written the same; compares candidates alone."""
    has_ids = [call.id for call in recorded.tool_calls] == [call.id for call in sent.tool_calls]
    thinks_alike = sent.reasoning is not None and sent.reasoning == recorded.reasoning
    return has_ids * 4 + (recorded.text == sent.text) * 2 + thinks_alike
