"""Chat messages of rows: one form for all, before a chat template renders them. Pure.

A template renders as nothing, or as a word such as "None", what it does not expect. So other forms are refused here.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

from runtime.util.formatting import show

Messages = list[dict[str, Any]]

ANSWERS: Final = "assistant"  # role of the model
RESULTS: Final = ("tool", "function", "ipython", "observation")  # roles of a tool's result: any JSON value, also ""
ROLES: Final = ("system", "developer", "user", ANSWERS, *RESULTS)  # others need a template that names them
THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")  # keys of an answer's thought
CALLS: Final = ("tool_calls", "function_call")
TEXT_PARTS: Final = ("text", "input_text", "output_text")  # types of a text part


def plain_messages(turns: Messages, key: str) -> Messages:
    """Return chat messages whose content is a text, or of a tool any JSON value.

    Text parts are joined without a character between them. Keys with the value null are left out, as if they were not
    there: Parquet writes them. Empty content beside tool calls becomes "".

    Args:
        turns: messages of a row.
        key: their column, for errors.

    Raises:
        ValueError: a message has no role, or no content that a template can render; names column and message.
    """
    return [_plain(turn, f"{key}: message {number}") for number, turn in enumerate(turns)]


def _plain(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no role, but {', '.join(turn) or 'nothing'}")
    where = f"{where} ({role})"
    plain = {name: value for name, value in turn.items() if value is not None}
    if plain.get(CALLS[0]) == []:
        del plain[CALLS[0]]
    has_calls = _check_calls(plain, where)
    for name in THOUGHTS:
        if name in plain and not isinstance(plain[name], str):
            raise ValueError(f"{where} has {name} = {show(plain[name])}; allowed: a text")
    if "content" not in turn and not has_calls:
        raise ValueError(f"{where} has no content, but {', '.join(turn)}")
    return {**plain, "content": _content(turn.get("content"), role, has_calls, where)}


def _content(content: Any, role: str, has_calls: bool, where: str) -> Any:
    """Return the content of a message as a text, or of a tool as it is."""
    if isinstance(content, list) and (role not in RESULTS or _are_parts(cast("list[Any]", content))):
        content = "".join(_text_of(part, where) for part in cast("list[Any]", content))
    if content is None and has_calls:
        return ""
    if isinstance(content, str):
        if not content.strip() and not has_calls and role not in RESULTS:
            raise ValueError(f"{where} has an empty content; leave the message out, or give it a text")
        return content
    if content is None or role not in RESULTS:
        value = cast("Any", content)
        raise ValueError(f"{where} has content = {show(value)}; allowed: a text, or a list of text parts")
    return cast("Any", content)


def _check_calls(plain: Mapping[str, Any], where: str) -> bool:
    """Check the form of tool calls, and return whether there are any."""
    calls = calls_of(plain)
    for name in CALLS:
        if name in plain and not isinstance(plain[name], list if name == CALLS[0] else dict):
            form = "a list of objects" if name == CALLS[0] else "an object"
            raise ValueError(f"{where} has {name} = {show(plain[name])}; allowed: {form}")
    for call in calls:
        if not isinstance(called(call).get("name"), str):
            raise ValueError(f"{where} has a tool call without a name: {show(call)}")
    return bool(calls)


def calls_of(turn: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message, with OpenAI's older single one."""
    calls, single = turn.get(CALLS[0]), turn.get(CALLS[1])
    found: list[Any] = [*cast("list[Any]", calls)] if isinstance(calls, list) else []
    return [*found, single] if isinstance(single, dict) else found


def called(call: Any) -> dict[str, Any]:
    """Return name and arguments of a tool call, which may be under `function`; empty: it has another form."""
    if not isinstance(call, dict):
        return {}
    inner = cast("dict[str, Any]", call).get("function")
    return cast("dict[str, Any]", inner if isinstance(inner, dict) else call)


def _are_parts(content: list[Any]) -> bool:
    """Whether a list is one of content parts, not a tool's own result."""
    return all(isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("type"), str) for part in content)


def _text_of(part: Any, where: str) -> str:
    """Return the text of a content part."""
    if isinstance(part, str):
        return part
    named = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind, text = named.get("type", TEXT_PARTS[0]), named.get("text")
    if kind in TEXT_PARTS and isinstance(text, str):
        return text
    if kind in TEXT_PARTS:
        raise ValueError(f"{where} has a part without a text: {show(cast('Any', part))}")
    raise ValueError(f"{where} has a part of type {show(kind)}; allowed: {', '.join(TEXT_PARTS)}")
