"""The built-in graders: pure functions of response and label, known by name."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from actors.reward.samples import GradedSample
from runtime.settings.plugins import OWN

BOXED_PREFIX = "boxed_"
Grader = Callable[[GradedSample], float]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")
_BRACE = re.compile(r"\\boxed\{|\{|\}")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def exact_match(response: str, label: str) -> float:
    """1 if response and label are equal but for space around them, else 0."""
    return float(response.strip() == label.strip())


def positional_match(response: str, label: str, *, truncated: bool = False) -> float:
    """Share of positions with the right character: matching positions / length of the longer text.

    A truncated response scores 0, since otherwise never ending would pay as well as ending. Two empty texts score 1.
    """
    if truncated:
        return 0.0
    response, label = response.strip(), label.strip()
    longer = max(len(response), len(label))
    if longer == 0:
        return 1.0
    return sum(ours == theirs for ours, theirs in zip(response, label, strict=False)) / longer


def f1(response: str, label: str) -> float:
    """F1 of the words that response and label share.

    Words are compared in lower case, without punctuation and articles. When either text is yes, no or noanswer the
    two must be equal.

    Source:
        SQuAD's evaluation (arXiv 1606.05250), with HotpotQA's rule for closed answers (arXiv 1809.09600).
    """
    ours, theirs = _words(response), _words(label)
    closed = _CLOSED_ANSWERS.intersection((" ".join(ours), " ".join(theirs)))
    if closed and ours != theirs:
        return 0.0
    num_shared = sum((Counter(ours) & Counter(theirs)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(ours), num_shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def math(response: str, label: str) -> float:
    r"""1 if the response's answer equals the label's, else 0; an empty label scores 0.

    The answer is the last \boxed{...}, or else what follows the last "####", or else the last number in the text when
    the label is a number and the whole text when it is not. Numbers are compared by exact value (1,000 = 1000.0,
    0.5 = 1/2 = \frac{1}{2}), other answers as text without spaces, dollar signs and text commands. There is no
    symbolic algebra: x+1 and 1+x differ.
    """
    truth = _normal_answer(_marked_answer(label) or label)
    if not truth:
        return 0.0
    true_value = _number(truth)
    answer = _marked_answer(response)
    if answer is None:
        answer = response if true_value is None else _last_number(response)
    answer = _normal_answer(answer)
    if true_value is not None:
        return float(_number(answer) == true_value)
    return float(answer == truth)


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


def _marked_answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, marker, after = text.rpartition("####")
    lines = after.strip().splitlines()
    return lines[0] if marker and lines else None


def _last_number(text: str) -> str:
    numbers = _NUMBER_IN_TEXT.findall(text)
    return numbers[-1] if numbers else ""


def _normal_answer(text: str) -> str:
    text = _LATEX_FRACTION.sub(r"\1/\2", text.strip())
    text = _LATEX_TEXT.sub(r"\1", text)
    for drop in (r"\left", r"\right", r"\!", r"\,", r"\ ", r"\$", "$", r"\%", "%", " "):
        text = text.replace(drop, "")
    return text.rstrip(".")


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number or fraction; None for anything else, and for absurd lengths."""
    if not text or len(text) > 64 or not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or "1")
    except (ValueError, ZeroDivisionError):
        return None


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _text(label: Any) -> str:
    if label is None:
        raise ValueError("the sample has no label; set label_key of its data source")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label must be text or a number, not {type(label).__name__}")
    return str(label)


BUILT_IN_GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "exact_match": lambda sample: exact_match(sample.response, _text(sample.label)),
        "positional_match": lambda sample: positional_match(
            sample.response, _text(sample.label), truncated=sample.truncated
        ),
        "f1": lambda sample: f1(sample.response, _text(sample.label)),
        "math": lambda sample: math(sample.response, _text(sample.label)),
    }
)


def find_grader(name: str) -> Grader:
    r"""A built-in grader; "boxed_" before its name grades only the content of the last \boxed{...}, "" if none.

    Raises:
        ValueError: no grader has this name; names the nearest ones.
    """
    plain = name.removeprefix(BOXED_PREFIX)
    grader = BUILT_IN_GRADERS.get(plain)
    if grader is None:
        names = ", ".join(BUILT_IN_GRADERS)
        close = get_close_matches(plain, BUILT_IN_GRADERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no grader {name!r}: {hint}built in are {names}; own ones are {OWN}")
    return _boxed(grader) if name.startswith(BOXED_PREFIX) else grader


def _boxed(grader: Grader) -> Grader:
    def grade(sample: GradedSample) -> float:
        response = last_boxed(sample.response) or ""
        return grader(
            GradedSample(
                index=sample.index,
                part=sample.part,
                prompt=sample.prompt,
                response=response,
                status=sample.status,
                response_len=sample.response_len,
                label=sample.label,
                metadata=sample.metadata,
            )
        )

    return grade
