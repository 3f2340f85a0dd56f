"""Numeric grader: extracts the answer from a text, compares numbers by value and other answers as text."""

import re
from fractions import Fraction

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.labels import Label, text_of

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}")


def numeric(response: str, label: Label) -> float:
    r"""Compare the answer of the response with the label, numbers by value, without algebra.

    The answer is the last \boxed{...}, or else the text after the last "####". Without either, it is the last number in
    the text if the label is a number, and otherwise the whole text. Numbers are compared by exact value (1,000 =
    1000.0, 0.5 = 1/2 = \frac{1}{2}), other answers as text without spaces, dollar signs and text commands: x+1 and 1+x
    differ. The `math` grader is a different one.

    Args:
        response: The whole response.
        label: The right answer, also in a box or after "####", as in GSM8K; a number is taken as its text.

    Returns:
        1.0 if they are equal, else 0.0.

    Edges:
        An empty label scores 0. A number of over 64 characters is compared as text. Never raises.
    """
    text = text_of(label)
    truth = _normal_answer(_marked_answer(text) or text)
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
    """Exact value of a plain number or fraction; None for anything else, and for texts over 64 characters."""
    if not text or len(text) > 64 or not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or "1")
    except (ValueError, ZeroDivisionError):
        return None
