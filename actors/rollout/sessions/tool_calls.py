"""Reads the text of a sampled turn: thoughts, words and calls of tools, in the formats of chat templates. Pure.

Arguments stay the text that was sampled. A call that is not complete JSON stays part of the words, as the model wrote
it: nothing that was sampled is repaired.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

from runtime.sessions.turns import Tool

SPACE: Final = re.compile(r"[ \t\r\n]*")
NAME: Final = re.compile(r"[\w.:/-]{1,128}")
BETWEEN: Final = re.compile(r"[\s;,]*")  # calls of bare JSON
OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
TAGGED_ARGUMENT: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
MARKED_CALLS: Final = re.compile(r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
MARKED_CALL: Final = re.compile(r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>\s*", re.DOTALL)
FENCED: Final = re.compile(r"(\S+)\s*```json\n(.*?)\n?```\s*", re.DOTALL)  # name and arguments
HARMONY_PART: Final = re.compile(r"(?:<\|end\|>|<\|call\|>|<\|return\|>)?<\|start\|>assistant|<\|end\|>\Z")
RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.:/-]{1,128})")


class Call(NamedTuple):
    """A call of a tool, before it has an id."""

    name: str
    arguments: str  # JSON


class Parsed(NamedTuple):
    """What a turn says."""

    text: str
    reasoning: str | None
    calls: tuple[Call, ...]


class _Broken(ValueError):
    """A text is not the JSON of a call."""


Tools = Mapping[str, Tool]
Parser = Callable[[str, Tools, bool], Parsed]


def tagged_json(text: str, tools: Tools, in_thoughts: bool) -> Parsed:
    """Read <think>, words and <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
    return _tagged(text, tools, in_thoughts, lambda body: _named(body, ("arguments", "parameters")))


def tagged_arguments(text: str, tools: Tools, in_thoughts: bool) -> Parsed:
    """Read <think>, words and <tool_call>name with keys and values in tags. Their JSON is made here."""

    def call(body: str) -> Call:
        name, _, rest = body.strip().partition("\n")
        if "<arg_key>" in name:
            name, _, rest = body.strip().partition("<arg_key>")
            rest = "<arg_key>" + rest
        found = {match[1].strip(): match[2] for match in TAGGED_ARGUMENT.finditer(rest)}
        if TAGGED_ARGUMENT.sub("", rest).strip():
            raise _Broken
        declared: Any = tools[name.strip()].parameters.get("properties") if name.strip() in tools else None
        schemas = cast("dict[str, Any]", declared) if isinstance(declared, dict) else {}
        values = {key: _value_of(value, schemas.get(key)) for key, value in found.items()}
        return Call(_checked_name(name.strip()), json.dumps(values, ensure_ascii=False))

    return _tagged(text, tools, in_thoughts, call)


def bare_json(text: str, tools: Tools, in_thoughts: bool) -> Parsed:
    """Read an answer that is nothing but one or more objects {"name": ..., "parameters": ...}, else words."""
    reasoning, text = _thoughts(text, in_thoughts)
    body = text.strip().removeprefix(PYTHON_TAG)
    if not tools or not body.lstrip().startswith("{"):
        return Parsed(text, reasoning, ())
    calls: list[Call] = []
    at = 0
    try:
        while (at := _after(BETWEEN, body, at)) < len(body):
            members, end = _members(body, at)
            if not members.keys() & {"parameters", "arguments"}:
                raise _Broken
            calls.append(_call(members, ("parameters", "arguments")))
            at = end
    except _Broken:
        return Parsed(text, reasoning, ())
    return Parsed("", reasoning, tuple(calls))


def marked_calls(text: str, tools: Tools, in_thoughts: bool) -> Parsed:
    """Read <think>, words and calls between special tokens, with the arguments fenced or bare."""
    reasoning, text = _thoughts(text, in_thoughts)
    found = MARKED_CALLS.search(text) if tools else None
    if found is None:
        return Parsed(text, reasoning, ())
    calls: list[Call] = []
    at = 0
    try:
        while at < len(found[1]):
            match = MARKED_CALL.match(found[1], at)
            if match is None:
                raise _Broken
            fenced = FENCED.fullmatch(match[2])
            name, arguments = (fenced[1], fenced[2]) if fenced else (match[1], match[2])
            calls.append(Call(_checked_name(name.strip()), _checked_arguments(arguments.strip())))
            at = match.end()
    except _Broken:
        return Parsed(text, reasoning, ())
    words = text[: found.start()] + text[found.end() :]
    return Parsed(words.rstrip() if calls else text, reasoning, tuple(calls))


def harmony(text: str, tools: Tools, in_thoughts: bool) -> Parsed:
    """Read channels: analysis is thoughts, commentary to a function is a call, all else is words."""
    thoughts: list[str] = []
    words: list[str] = []
    calls: list[Call] = []
    for part in HARMONY_PART.split(text):
        head, is_message, body = part.partition("<|message|>")
        body = re.sub(r"(<\|end\|>|<\|call\|>|<\|return\|>)\Z", "", body)
        if not is_message:
            words += [head] if head.strip() else []
            continue
        recipient = RECIPIENT.search(head)
        if recipient is not None and tools:
            try:
                calls.append(Call(recipient[1], _checked_arguments(body)))
            except _Broken:
                words.append(part)
        elif "<|channel|>analysis" in head:
            thoughts.append(body)
        else:
            words.append(body)
    return Parsed("\n".join(words), "\n".join(thoughts) or None, tuple(calls))


def _tagged(text: str, tools: Tools, in_thoughts: bool, call: Callable[[str], Call]) -> Parsed:
    """Read calls between tags. White space between words and calls belongs to the calls."""
    reasoning, text = _thoughts(text, in_thoughts)
    if not tools or OPEN_CALL not in text:
        return Parsed(text, reasoning, ())
    words, *blocks = text.split(OPEN_CALL)
    calls: list[Call] = []
    for block in blocks:
        body, _, after = block.partition(CLOSE_CALL)
        try:
            calls.append(call(body))
        except _Broken:
            words += OPEN_CALL + block
        else:
            words = words.rstrip() + (after if after.strip() else "")
    return Parsed(words, reasoning, tuple(calls))


def _thoughts(text: str, in_thoughts: bool) -> tuple[str | None, str]:
    """Split a text into thoughts and the rest. Thoughts that do not end leave no rest."""
    if not in_thoughts and not (CLOSE_THOUGHT in text and OPEN_THOUGHT not in text):  # some models do not open them
        before, opened, rest = text.partition(OPEN_THOUGHT)
        if not opened or before.strip():
            return None, text
        text = rest
    reasoning, _, rest = text.partition(CLOSE_THOUGHT)
    return reasoning.strip("\n") or None, rest.lstrip("\n")


def _named(body: str, keys: tuple[str, ...]) -> Call:
    start = _after(SPACE, body, 0)
    members, end = _members(body, start)
    if body[end:].strip():
        raise _Broken
    return _call(members, keys)


def _call(members: Mapping[str, str], keys: tuple[str, ...]) -> Call:
    name = json.loads(members.get("name", "null"))
    arguments = next((members[key] for key in keys if key in members), "{}")
    if arguments.startswith('"'):  # JSON in a string, as in OpenAI's messages
        arguments = str(json.loads(arguments))
    return Call(_checked_name(name), _checked_arguments(arguments))


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _Broken
    return name


def _checked_arguments(text: str) -> str:
    """Return arguments unchanged. Raises _Broken: they are not a JSON object."""
    start = _after(SPACE, text, 0)
    _, end = _members(text, start)
    if text[end:].strip():
        raise _Broken
    return text


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """Return the members of a JSON object as they are written, and where it ends. Raises _Broken: it is none."""
    found: dict[str, str] = {}
    if text[at : at + 1] != "{":
        raise _Broken
    at = _after(SPACE, text, at + 1)
    while text[at : at + 1] != "}":
        if found:
            at = _after(SPACE, text, _expected(text, at, ","))
        key, at = _decoded(text, at)
        at = _after(SPACE, text, _expected(text, _after(SPACE, text, at), ":"))
        _, end = _decoded(text, at)
        found[_text_of(key)] = text[at:end]
        at = _after(SPACE, text, end)
    return found, at + 1


def _refused(constant: str) -> NoReturn:
    raise _Broken(constant)  # NaN and Infinity, which are not JSON


_DECODER: Final = json.JSONDecoder(parse_constant=_refused, parse_int=float)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        raise _Broken from None


def _text_of(key: object) -> str:
    if not isinstance(key, str):
        raise _Broken
    return key


def _expected(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise _Broken
    return at + 1


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _value_of(text: str, schema: object) -> object:
    """Return an argument between tags: a text if its schema says so, else the JSON value that it is, or a text."""
    if isinstance(schema, dict) and cast("dict[str, object]", schema).get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return text
