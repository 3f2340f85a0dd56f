r"""The last \boxed{...} of a text: what an answer is read from, and a grader of nothing else."""

import re
from collections.abc import Callable

import msgspec

from actors.reward.samples import GradedSample

BOXED_PREFIX = "boxed_"
Grader = Callable[[GradedSample], float]

_BRACE = re.compile(r"\\boxed\{|\{|\}")


def last_boxed(text: str) -> str | None:
    r"""Content of the \boxed{...} that opens last and is closed, braces balanced; None if there is none.

    One pass: a response that repeats an open box a thousand times costs no more than another.
    """
    best: tuple[int, int] | None = None
    open_boxes: list[int | None] = []  # per open brace, where a box's content starts, None for other braces
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            open_boxes.append(None if match[0] == "{" else match.end())
        elif open_boxes:
            start = open_boxes.pop()
            if start is not None and (best is None or start > best[0]):
                best = start, match.start()
    return None if best is None else text[best[0] : best[1]]


def boxed(grader: Grader) -> Grader:
    """A grader of what stands in the last box, "" if there is none."""

    def grade(sample: GradedSample) -> float:
        return grader(msgspec.structs.replace(sample, response=last_boxed(sample.response) or ""))

    return grade
