r"""Extracts the last \boxed{...} of a text, and restricts graders to its content."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from actors.reward.samples import GradedSample

BOXED_PREFIX = "boxed_"
Grader = Callable[[GradedSample], Any]  # returns a number, or a dict that has the reward

FBOX = re.compile(r"\\(?:fbox|framebox)(?=\s*\{)")  # another box, which `math` and `dapo` read
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)\\[{}]|\{|\}")


def last_boxed(text: str) -> str | None:
    r"""Find the content of the closed \boxed{...} that opens last, with balanced braces. `\{` and `\}` do not count.

    Args:
        text: A response.

    Returns:
        The content, which may be empty; None if there is no closed box.

    Edges:
        Of nested boxes the inner one counts. Runs in one pass, whatever is left open. Never raises.
    """
    best: tuple[int, int] | None = None
    open_boxes: list[int | None] = []  # per open brace: start of the box's content, or None for other braces
    for match in _BRACE.finditer(text):
        if match[0] in (r"\{", r"\}"):
            continue
        if match[0] != "}":
            open_boxes.append(None if match[0] == "{" else match.end())
        elif open_boxes:
            start = open_boxes.pop()
            if start is not None and (best is None or start > best[0]):
                best = start, match.start()
    return None if best is None else text[best[0] : best[1]]


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
