"""Leaves out what is no part of an answer: thoughts, tokens that end a turn, and characters that have no width."""

import re
from typing import Final

_WINDOW: Final = 100  # characters that a token and the space around it take at most
_TURN_END: Final = re.compile(r"\s{0,20}(?:<[|｜][^<>|｜\n]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>|\[EOS\])\s{0,20}\Z")
_NO_WIDTH: Final = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"  # marks, joiners, variants
)


def after_thought(response: str) -> str:
    """Return what follows the last `</think>`, without the end of the turn; "" if a thought that begins has no end."""
    _, end, said = response.rpartition("</think>")
    return "" if not end and said.lstrip().startswith("<think>") else without_turn_end(said)


def without_turn_end(text: str) -> str:
    """Remove the tokens at the end that an engine writes as text, such as <|im_end|>, <|endoftext|> and </s>."""
    end = len(text)
    while found := _TURN_END.search(text, max(0, end - _WINDOW), end):
        end = found.start()
    return text[:end]


def visible(text: str) -> str:
    """Remove characters that have no width, such as a zero-width space: 4\u200b2 looks like 42."""
    return text if text.isascii() else _NO_WIDTH.sub("", text)
