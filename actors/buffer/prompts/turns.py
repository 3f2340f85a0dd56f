"""Splits a rendered conversation into the turns that train and the text between them."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from actors.buffer.prompts.tokenizing import Messages, Tokenizing
from runtime.data.chat import ANSWERS
from runtime.data.chat_template import CLOSE, OPEN
from runtime.util.formatting import show

TRAINED: Final = ANSWERS  # role whose turns are trained
MASKED: Final = ("step_loss_mask", "weight")  # 0 excludes a message from the loss; slime's key, OpenAI's
FIRST_MARK: Final = 0xE010  # characters for private use; one pair marks each turn
LAST_MARK: Final = 0xF8FF
EMPTY_THOUGHT: Final = re.compile(r"\s*<think>\s*</think>\s*")  # a template writes it into an answer without one
THOUGHT: Final = re.compile(r"(</?think>\s*)(?=\S)")  # templates cut a turn there


class Piece(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    trains: bool


class _Span(NamedTuple):
    """Where a trained turn begins and ends in the rendered conversation."""

    start: int
    end: int


class _Refused(Exception):
    """A turn cannot be found in the rendered conversation."""


def pieces_of(turns: Messages, tokenizing: Tokenizing, **options: Any) -> list[Piece]:
    """Split a conversation where trained turns begin and end.

    A trained turn is the model's output after the generation prompt, plus the template's end of turn. The whole
    conversation is rendered once, and this text is what trains. There are three ways to find a turn in it. The first
    one that applies is taken:

    - `{% generation %}` in the template marks the output.
    - The conversation up to the turn, rendered by itself, begins the whole.
    - The template changes earlier turns, such as one that drops their thoughts. Marks in the turn's text show
      where it is; without the marks, the text must be the same.

    Args:
        turns: chat messages.
        tokenizing: renders them.
        options: further arguments of the chat template.

    Raises:
        ValueError: no turn is trained, or a trained turn cannot be found in the rendered conversation.
    """
    chosen = [index for index, turn in enumerate(turns) if _trains(turn, index)]
    if not chosen:
        raise ValueError(f"none of its {len(turns)} messages is one of the {TRAINED} to train on")
    closed = {**options, "add_generation_prompt": False}
    marked = tokenizing.render_marked(turns, **closed)
    if marked is not None:
        return _generated(marked, turns, chosen, _given_thought(marked, tokenizing, options))
    whole = tokenizing.render(turns, **closed)
    spans: list[_Span] = []
    for index in chosen:
        try:
            spans.append(_span(whole, turns, index, spans[-1].end if spans else 0, tokenizing, options))
        except _Refused as error:
            raise ValueError(_not_found(index, len(turns), str(error))) from None
    return list(_cut(whole, spans))


def _cut(whole: str, spans: Sequence[_Span]) -> Iterator[Piece]:
    at = 0
    for span in spans:
        yield from (
            piece
            for piece in (Piece(whole[at : span.start], False), Piece(whole[span.start : span.end], True))
            if piece.text
        )
        at = span.end
    if whole[at:]:
        yield Piece(whole[at:], False)


def _given_thought(marked: str, tokenizing: Tokenizing, options: Mapping[str, Any]) -> str:
    """Return the empty thought that the generation prompt gives, if one of the marked outputs begins with one."""
    if not any(EMPTY_THOUGHT.match(output) for output in marked.split(OPEN)[1:]):
        return ""
    arguments = {name: value for name, value in options.items() if name != "tools"}
    return _end_of_generation_prompt(tokenizing, json.dumps(arguments, default=str))


@functools.lru_cache(maxsize=16)
def _end_of_generation_prompt(tokenizing: Tokenizing, arguments: str) -> str:
    """Return the empty thought at the end of the generation prompt; "": there is none. Depends on no message."""
    options = {**json.loads(arguments), "add_generation_prompt": True}
    opened = tokenizing.render([{"role": "user", "content": "?"}], **options)
    given = opened[opened.rfind("<think>") :]
    return given if EMPTY_THOUGHT.fullmatch(given) else ""


def _generated(marked: str, turns: Messages, chosen: Sequence[int], given: str) -> list[Piece]:
    """Split at the marks of {% generation %}: the n-th block is the n-th turn of the assistant.

    What the generation prompt gives does not train, though TRL's templates mark it.
    """
    outputs = [index for index, turn in enumerate(turns) if turn.get("role") == TRAINED]
    parts = re.split(f"[{OPEN}{CLOSE}]", marked)
    if len(parts) != 2 * len(outputs) + 1:
        raise ValueError(
            f"the chat template marks {len(parts) // 2} outputs with {{% generation %}}, but {len(outputs)} messages "
            f"are of the {TRAINED}"
        )
    pieces: list[Piece] = []
    for number, text in enumerate(parts):
        trains = number % 2 == 1 and outputs[number // 2] in chosen
        lead = len(text) - len(text.lstrip())
        cut = lead + len(given) if trains and given and text.startswith(given, lead) else 0
        pieces += [Piece(text[:cut], False), Piece(text[cut:], trains)]
    return [piece for piece in pieces if piece.text]


def _span(
    whole: str, turns: Messages, index: int, at: int, tokenizing: Tokenizing, options: Mapping[str, Any]
) -> _Span:
    """Find a trained turn in the whole conversation, after position `at`. Raises _Refused."""

    def render(messages: Messages, *, opened: bool) -> str:
        return tokenizing.render(messages, **{**options, "add_generation_prompt": opened})

    before, after = render(turns[:index], opened=True), render(turns[: index + 1], opened=False)
    if at <= len(before) < len(after) and after.startswith(before) and whole.startswith(after):
        return _Span(len(before), len(after))
    closed = render(turns[:index], opened=False) if index else ""
    if not before.startswith(closed):
        raise _Refused("its generation prompt does not follow the earlier messages")
    opening = before[len(closed) :]
    alone = _positions(turns[: index + 1], index, after, render)
    first, last = _positions(turns, index, whole, render)
    start = _after_opening(whole, opening, at, first)
    ending = after[alone[1] :]
    if not whole.startswith(ending, last):
        raise _Refused("it ends differently when more messages follow")
    return _Span(start, last + len(ending))


def _positions(turns: Messages, index: int, rendered: str, render: Any) -> tuple[int, int]:
    """Return where the text of a turn begins and ends in the rendered messages.

    Raises:
        _Refused: the marks changed more than they should, or the turn has no text to mark.
    """
    begin, end = _marks(index)
    if any(mark in rendered for mark in (begin, end)):
        raise _Refused("its text has characters for private use")
    marked = render([*turns[:index], _with_marks(turns[index], begin, end), *turns[index + 1 :]], opened=False)
    if marked.replace(begin, "").replace(end, "") != rendered:
        raise _Refused("the template changes its text")
    places = [place for place, character in enumerate(marked) if character in (begin, end)]
    if not places or marked[places[-1]] != end:
        raise _Refused("it has no text")
    return places[0], places[-1] - (len(places) - 1)


def _marks(index: int) -> tuple[str, str]:
    number = FIRST_MARK + 2 * (index % ((LAST_MARK - FIRST_MARK) // 2))
    return chr(number), chr(number + 1)


def _with_marks(turn: Mapping[str, Any], begin: str, end: str) -> dict[str, Any]:
    """Return the message with marks at the begin and the end of its text, or of its tool calls' names."""
    marked = dict(turn)
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, str) and content.strip():
        marked["content"] = _around(content, begin, "" if calls else end)
    if isinstance(turn.get("reasoning_content"), str) and turn["reasoning_content"].strip():
        marked["reasoning_content"] = _around(turn["reasoning_content"], begin, "")
    if isinstance(calls, list) and calls:
        named = [
            _renamed(call, begin if number == 0 else "", "") for number, call in enumerate(cast("list[Any]", calls))
        ]
        marked["tool_calls"] = [*named[:-1], _renamed(named[-1], "", end)]
    return marked


def _around(text: str, begin: str, end: str) -> str:
    """Mark a text inside of its outer white space, which templates strip, and behind each thought, which they drop."""
    core = text.strip()
    lead, trail = text[: text.index(core)], text[text.index(core) + len(core) :]
    return lead + begin + THOUGHT.sub(rf"\g<1>{begin}", core) + end + trail


def _renamed(call: Any, begin: str, end: str) -> Any:
    """Mark the name of a tool call."""
    if not isinstance(call, dict):
        return call
    call = cast("dict[str, Any]", call)
    if isinstance(call.get("function"), dict):
        return {**call, "function": _renamed(call["function"], begin, end)}
    return {**call, "name": f"{begin}{call['name']}{end}"} if isinstance(call.get("name"), str) else call


def _after_opening(whole: str, opening: str, at: int, first: int) -> int:
    """Return where the output begins: behind the generation prompt, or the part of it that earlier turns keep."""
    cuts = [len(opening), *sorted((found.start() for found in re.finditer(r"[<\n]", opening)), reverse=True)]
    for cut in cuts:
        place = whole.rfind(opening[:cut], at, first) if cut else -1
        if place >= 0:
            return place + cut
    raise _Refused("it is opened differently when more messages follow")


def _not_found(index: int, num_turns: int, why: str) -> str:
    return (
        f"message {index} of {num_turns} (from 0) cannot be found in the rendered conversation: {why}. Mark the output "
        "of the assistant with {% generation %} in the model's chat_template.jinja, or leave the turn untrained with "
        f'"{MASKED[0]}": 0'
    )


def _trains(turn: Mapping[str, Any], index: int) -> bool:
    for key in MASKED:
        if key in turn and turn[key] not in (0, 1):
            raise ValueError(f"message {index} has {key} = {show(turn[key])}; allowed: 0 and 1")
    return turn.get("role") == TRAINED and all(turn.get(key, 1) for key in MASKED)
