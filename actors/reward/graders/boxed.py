r"""Extracts the last \boxed{...} of a text, and restricts graders to its content."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from actors.reward.samples import GradedSample

BOXED_PREFIX = "boxed_"
Grader = Callable[[GradedSample], Any]  # returns a number, or a dict that has the reward

FBOX = re.compile(r"\\(?:fbox|framebox)(?![A-Za-z])")  # another box, which `math` and `dapo` read
# Content without braces begins with a number, a command, or a letter alone: \boxed in a sentence is no box
_BARE = (
    r"(?=[-+]?\.?\d|\\(?!boxed)[A-Za-z]|[A-Za-z]\s*(?:[$.,;\n]|\\[)\]]|\Z))"
    r"(?P<bare>(?:[^${}\n\\]|\\[^\n()\[\]]|\{(?:[^{}\n]|\{[^{}\n]*\})*\})*?)"
    r"(?=\$|\n|\\[)\]]|[.,;](?:\s|\Z)|\\boxed|\Z)"
)
_BRACE = re.compile(rf"\\boxed\s*\{{|\\boxed(?![A-Za-z])[ \t]*{_BARE}|(?<!\\)\\[{{}}]|\{{|\}}")


def last_boxed(text: str) -> str | None:
    r"""Find the content of the \boxed{...} that opens last, with balanced braces. `\{` and `\}` do not count.

    Args:
        text: A response.

    Returns:
        The content, which may be empty; None if there is no box, or the last one is not closed.

    Edges:
        Of nested boxes the inner one counts. \boxed 42 has no braces: its content ends with the formula, the line or
        the sentence. Runs in one pass, whatever is left open. Never raises.
    """
    last: str | None = None
    last_start = -1  # of the content of the box that opened last, closed or not
    open_boxes: list[int | None] = []  # per open brace: start of the box's content, or None for other braces
    for match in _BRACE.finditer(text):
        if match[0] in (r"\{", r"\}"):
            continue
        if match["bare"] is not None:
            last, last_start = match["bare"], match.start("bare")
        elif match[0] == "{":
            open_boxes.append(None)
        elif match[0] != "}":
            last, last_start = None, match.end()
            open_boxes.append(match.end())
        elif open_boxes and open_boxes.pop() == last_start:
            last = text[last_start : match.start()]
    return last


def after_hashes(text: str) -> str | None:
    """The line after the last "####", as GSM8K's rows have it; None without one."""
    _, marker, after = text.rpartition("####")
    lines = after.strip().splitlines()
    return lines[0] if marker and lines else None


def stated(label: str) -> str:
    """The answer of a label: the content of its last box, or the line after its last "####", or all of it."""
    in_box = last_boxed(label)
    return in_box if in_box is not None else after_hashes(label) or label


def boxed(grader: Grader, before: str = "") -> Grader:
    """Restrict a grader to the content of the last box, or "" if there is none.

    Args:
        grader: reads a response.
        before: text that the grader expects in front of an answer.
    """

    def grade(sample: GradedSample) -> Any:
        content = last_boxed(sample.response)
        return grader(msgspec.structs.replace(sample, response=before + content if content else ""))

    return grade
