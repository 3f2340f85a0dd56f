"""Verifies that a chat template wrote every text of the messages: many leave out what they do not expect."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, cast

from actors.buffer.prompts.tokenizing import Messages, Tokenizing
from runtime.data.chat import ANSWERS, CALLS, ROLES, THOUGHTS, called, calls_of
from runtime.util.formatting import show

FIRST_MARK: Final = 0xF0000  # characters for private use, of a plane that texts do not use
NUM_MARKS: Final = 0xFFFD
MAX_STEPS: Final = 4096  # pairs of messages to remember; data has a few dozen kinds
SPACE: Final = re.compile(r"\s+")
TAG: Final = re.compile(r"<[^<>\s][^<>]*>")
THOUGHT_TAG: Final = re.compile(r"(<think>|</think>)")
END_OF_THOUGHT: Final = "</think>"


class Rendered(NamedTuple):
    """The messages of a row and their rendering."""

    turns: Messages
    text: str
    tools: Any
    options: Mapping[str, Any]  # further arguments of the template, with add_generation_prompt


class _Text(NamedTuple):
    """A text of a message that the template should write."""

    what: str  # for errors
    value: Any  # a text, or a value that is written as JSON
    mark: str  # character in it, in the second rendering
    is_optional: bool  # may be left out, which is counted


class Rendering:
    """Verifies the renderings of one model's template.

    A row costs a search for its texts. The first row with two messages of new kinds in a row is rendered once more,
    with a mark in each text. So a text that stands elsewhere too is not taken for the message's own. A row whose texts
    are not found in their order is also rendered once more.

    Optional are thoughts in the content, because a template that knows thoughts drops them on purpose, and in all
    messages but the last: thoughts under a key of their own, and texts beside tool calls.
    """

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing
        self._roles = set(ROLES)
        self._seen: set[tuple[Any, ...]] = set()
        self._num_thoughts = self._num_without_tools = 0

    def take_note(self) -> str | None:
        """Describe what the template left out since the last call; None: nothing."""
        parts: list[str] = []
        if self._num_thoughts:
            parts.append(f"{self._num_thoughts:,} thoughts, or texts beside tool calls")
        if self._num_without_tools:
            parts.append(f"the tools of {self._num_without_tools:,} rows")
        self._num_thoughts = self._num_without_tools = 0
        return f"the chat template leaves out {' and '.join(parts)}" if parts else None

    def check_roles(self, turns: Messages, tools: Any = None) -> None:
        """Refuse roles that are not usual and that the template does not name.

        Raises:
            ValueError: names the message and its role.
        """
        for number, turn in enumerate(turns):
            if (role := turn["role"]) in self._roles:
                continue
            if not re.search(rf"""(['"]){re.escape(role)}\1""", self._tokenizing.source(tools=tools)):
                raise ValueError(
                    f"message {number} has the role {role!r}, which the chat template does not name; allowed: "
                    f"{', '.join(ROLES)}, and roles that the template names"
                )
            self._roles.add(role)

    def verify(self, row: Rendered, data: str) -> None:
        """Check that the rendering has every text of the messages, and count optional ones that are left out.

        Args:
            row: messages and rendering.
            data: name of the data source, all of whose rows have the same options.

        Raises:
            ValueError: the template left a text out; names the message and the text.
        """
        kinds, num_left_out = _search(row)
        steps = [(data, *step) for step in zip([bool(row.tools), *kinds], kinds, [*kinds[1:], None], strict=False)]
        if num_left_out is None or not self._seen.issuperset(steps):
            num_left_out = self._verify_marked(row)
            self._seen.update(steps[: MAX_STEPS - len(self._seen)])
        self._num_thoughts += num_left_out
        self._num_without_tools += bool(row.tools) and not _has_tools(row)

    def _verify_marked(self, row: Rendered) -> int:
        """Render once more with marks, and return the number of optional texts that are left out."""
        last = len(row.turns) - 1
        marks = (chr(FIRST_MARK + number % NUM_MARKS) for number in count())
        parted = [_parted(turn, is_last=number == last, marks=marks) for number, turn in enumerate(row.turns)]
        try:
            rendered = self._tokenizing.render([turn for _, turn in parted], tools=row.tools, **row.options)
        except ValueError:
            rendered = None  # the template refuses a mark, such as one among arguments
        num_left_out = 0
        for number, (texts, _) in enumerate(parted):
            try:
                num_left_out += sum(_is_left_out(item, row.text, rendered) for item in texts)
            except ValueError as error:
                raise ValueError(f"message {number} ({row.turns[number]['role']}): {error}") from None
        return num_left_out


def _search(row: Rendered) -> tuple[list[Any], int | None]:
    """Look for the texts in their order.

    Returns:
        The kind of each message, and the number of optional texts that are not there. None: another one is not there,
        or not in its place.
    """
    kinds, at, num_left_out = list[Any](), 0, 0
    for number, turn in enumerate(row.turns):
        content = turn["content"]
        if len(turn) == 2 and isinstance(content, str) and END_OF_THOUGHT not in content:  # the usual case
            kinds.append(turn["role"])
            core = content.strip()
            place = row.text.find(core, at) if at >= 0 else -1
            at = -1 if place < 0 else place + len(core)
        else:
            texts, _ = _parted(turn, is_last=number == len(row.turns) - 1)
            kinds.append((turn["role"], *(item.what for item in texts)))
            at, num_missing = _search_texts(texts, row.text, at)
            num_left_out += num_missing
    return kinds, None if at < 0 else num_left_out


def _search_texts(texts: Sequence[_Text], rendered: str, at: int) -> tuple[int, int]:
    """Return where the last text ends, and how many optional ones are not there; -1: another one is not there."""
    num_missing = 0
    for item in texts if at >= 0 else ():
        place, length = _place(item.value, rendered, at)
        if place < 0 and not item.is_optional:
            return -1, num_missing
        num_missing += place < 0
        at = at if place < 0 else place + length
    return at, num_missing


def _is_left_out(item: _Text, rendered: str, marked: str | None) -> bool:
    """Whether a text is missing, or its mark in the second rendering. Raises ValueError if it must be there."""
    has_mark = not item.mark or marked is None or _find(item.mark, marked, 0)[0] >= 0
    is_left_out = not has_mark or not _is_written(item.value, rendered)
    if is_left_out and not item.is_optional:
        raise ValueError(_why(item, is_changed=has_mark))
    return is_left_out


def _parted(
    turn: Mapping[str, Any], *, is_last: bool, marks: Iterator[str] | None = None
) -> tuple[list[_Text], dict[str, Any]]:
    """Return the texts of a message in their usual order, and the message with a mark in each of them."""
    texts: list[_Text] = []
    marked = dict(turn)

    def take(what: str, value: Any, is_optional: bool = False) -> Any:
        mark = next(marks) if marks is not None and isinstance(value, str | dict | list) else ""
        texts.append(_Text(what, value, mark, is_optional))
        return _marked(value, mark) if mark else cast("Any", value)

    for name in THOUGHTS:
        if (turn.get(name) or "").strip():
            marked[name] = take(name, turn[name], not is_last)
    calls = calls_of(turn)
    marked["content"] = _content_with_marks(turn, take, bool(calls) and not is_last)
    marked_calls = [_call_with_marks(call, take) for call in calls]
    if CALLS[1] in turn:
        marked[CALLS[1]] = marked_calls.pop()
    if marked_calls:
        marked[CALLS[0]] = marked_calls
    return texts, marked


def _content_with_marks(turn: Mapping[str, Any], take: Callable[[str, Any, bool], Any], is_optional: bool) -> Any:
    """Take the content of a message, or of an answer each text and each thought; return the content with marks."""
    content = turn["content"]
    if isinstance(content, str) and turn["role"] == ANSWERS and END_OF_THOUGHT in content:
        pieces = THOUGHT_TAG.split(content)
        is_thought = pieces[1] == END_OF_THOUGHT  # the generation prompt began it
        for number, piece in enumerate(pieces):
            if number % 2:
                is_thought = piece != END_OF_THOUGHT
            elif piece.strip():
                pieces[number] = take("thought" if is_thought else "content", piece, is_thought or is_optional)
        return "".join(pieces)
    return content if isinstance(content, str) and not content.strip() else take("content", content, is_optional)


def _call_with_marks(call: Any, take: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Take name and arguments of a tool call, and return the call with their marks."""
    inner = called(call)
    marked = {**inner, "name": take("tool call", inner["name"])}
    if inner.get("arguments"):
        marked["arguments"] = take(f"arguments of {inner['name']}", inner["arguments"])
    return marked if inner is call else {**call, "function": marked}


def _marked(value: Any, mark: str) -> Any:
    """Put a mark into a text, behind its middle and outside of tags; into an object or a list as one more item."""
    if isinstance(value, dict):
        return {**cast("dict[str, Any]", value), mark: mark}
    if isinstance(value, list):
        return [*cast("list[Any]", value), mark]
    core = value.strip()
    middle = (len(core) + 1) // 2
    tag = next((found for found in TAG.finditer(core) if found.start() < middle < found.end()), None)
    place = value.index(core) + (middle if tag is None else tag.end())
    return value[:place] + mark + value[place:]


def _find(text: str, rendered: str, at: int) -> tuple[int, int]:
    """Return where a text begins, from a place on, and its length there: as it is, or in a string of JSON."""
    for written in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
        if (place := rendered.find(written, at)) >= 0:
            return place, len(written)
    return -1, 0


def _place(value: Any, rendered: str, at: int) -> tuple[int, int]:
    return _find(value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False), rendered, at)


def _is_written(value: Any, rendered: str) -> bool:
    """Whether a text is anywhere in the rendering; of another value its JSON, or its keys and values one by one."""
    if _place(value, rendered, 0)[0] >= 0:
        return True
    if isinstance(value, bool):
        return str(value) in rendered
    items = _items(value)
    if items is None:
        return False
    dense = SPACE.sub("", rendered)
    if any(SPACE.sub("", json.dumps(value, ensure_ascii=ascii_only)) in dense for ascii_only in (False, True)):
        return True
    if SPACE.sub("", f"{value}") in dense:  # Python's form, which is no JSON
        return False
    return all(_is_written(item, rendered) for item in items)


def _items(value: Any) -> list[Any] | None:
    """Items of a list, or keys and values of an object; None for anything else."""
    if isinstance(value, dict):
        keys_and_values = cast("dict[str, Any]", value)
        return [*keys_and_values, *keys_and_values.values()]
    return cast("list[Any]", value) if isinstance(value, list) else None


def _why(item: _Text, *, is_changed: bool) -> str:
    left_out = "writes in another form" if is_changed else "leaves out"
    if not isinstance(item.value, str):
        remedy = "give it as a text of JSON"
    elif item.what in THOUGHTS:
        remedy = "put the thought where the template reads it, such as between <think> and </think> in the content"
    else:
        remedy = "leave it out of the data, or use a template that writes it"
    return f"the chat template {left_out} the {item.what} {show(item.value)}; {remedy}"


def _has_tools(row: Rendered) -> bool:
    """Whether the rendering names the first tool."""
    given: object = row.tools
    name = called(cast("list[Any]", given)[0]).get("name") if isinstance(given, list) and given else None
    return not isinstance(name, str) or name in row.text
