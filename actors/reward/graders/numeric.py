"""Numeric grader: extracts the answer from a text, compares numbers by value and other answers as text."""

import re
from collections import deque
from fractions import Fraction

from actors.reward.graders.boxed import after_hashes, last_boxed, stated
from actors.reward.graders.labels import Label, text_of
from actors.reward.graders.responses import after_thought, visible

_WHOLE = r"(?:\d{1,3} +(?=\d{1,3}/\d{1,3}(?!\d)))?"  # of 3 1/2
_DIGITS = _WHOLE + r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}(?!\w))?(?:/\d+)?"
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = rf"(?:[ \t]*(?P<scale>(?i:{'|'.join(_SCALES)}))(?![^\W\d_]))?"
_NUMBER = re.compile(r"[-+]?" + _DIGITS)
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])(?P<number>(?:-?[$€£¥]?|[$€£¥]-)" + _DIGITS + ")" + _SCALE)
_LEADS_TO = re.compile(r"(?is)^.*(?:=|(?<=[a-z]):|\banswer\s+is\b)")  # x = 72, Answer: 72
_SIGNS = r"\s.,;:()\[\]<>|_*`\"'#$€£¥%°~"
_STATED = re.compile(
    rf"[{_SIGNS}]*?(?P<number>[-+]?[$€£¥]?[-+]?{_DIGITS}){_SCALE}(?![^\W\d_])(?:[^\W\d_]{{2,}}+(?:[-/'][^\W\d_]+)*+|[{_SIGNS}])*"
)  # with nothing but words after it
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_LATEX_SIGNS = re.compile(
    r"\\(?:left|right)(?![A-Za-z])|\\[!,](?=,?\d)|\\[! ,$%()\[\]]|\{(?=,\})|(?<=\{,)\}|\^\{?\\circ\}?"
)
_POWER_OF_TEN = re.compile(r"(?<=\d) ?(?:\\times|\\cdot|[×*]) ?10 ?\^ ?(?:\{ ?([-+]?\d{1,2}) ?\}|([-+]?\d{1,2}))(?!\d)")
_MIXED = re.compile(r"(?<=\d) +(?=\d+/\d)")
_MIXED_NUMBER = re.compile(r"([-+]?)(\d+) +(\d+)/(\d+)")
_MINUS = str.maketrans("−–", "--")


def numeric(response: str, label: Label) -> float:
    r"""Compare the answer of the response with the label, numbers by value, without algebra.

    The answer is the last \boxed{...}, or else the line after the last "####". Without either, it is the last number in
    the text if the label is a number, and otherwise the whole text. Only what follows the last `</think>` counts.
    Numbers are compared by exact value (1,000 = 1000.0, 1.5 = 1 1/2 = \frac{3}{2}, 2 million = 2 \times 10^6), with or
    without words beside them (72 clips) and what leads to them (x = 72). Other answers are compared as text without
    spaces, dollar signs and text commands: x+1 and 1+x differ. The `math` grader is a different one.

    Args:
        response: The whole response.
        label: The right answer, also in a box or after "####", as in GSM8K; a number is taken as its text.

    Returns:
        1.0 if they are equal, else 0.0.

    Edges:
        An empty label scores 0. A number of over 64 characters is compared as text. Never raises.
    """
    truth, said = stated(visible(text_of(label))), visible(after_thought(response))
    if not _normal(truth):
        return 0.0
    true_value = _number(_without_latex(truth))
    if true_value is not None:
        return float(_value_in(said) == true_value)
    boxed = last_boxed(said)
    answer = boxed if boxed is not None else after_hashes(said)
    return float(_normal(said if answer is None else answer) == _normal(truth))


def _value_in(said: str) -> Fraction | None:
    """Value of the number that a response states as its answer; None without one."""
    boxed = last_boxed(said)
    if boxed is not None:
        return _value_of(boxed)
    value = _value_of(after_hashes(said) or "")
    if value is not None:
        return value  # else the line may be a heading, such as "#### Step 2"
    last = deque(_NUMBER_IN_TEXT.finditer(_without_latex(said)), maxlen=1)
    return _value(last[0]) if last else None


def _value_of(answer: str) -> Fraction | None:
    """Value of the number that an answer begins with, if nothing but words follows it."""
    found = _STATED.fullmatch(_LEADS_TO.sub("", _without_latex(answer)))
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    """Value of a number and the word for a power of ten, or dozen, behind it."""
    value = _number(found["number"])
    return value if value is None or found["scale"] is None else value * _SCALES[found["scale"].lower()]


def _without_latex(text: str) -> str:
    text = re.sub(r"(?<=\w)(?=\\[dt]?frac)", " ", text)
    text = _LATEX_FRACTION.sub(lambda found: f"{found[1] or found[2]}/{found[3] or found[4]} ", text)
    text = _POWER_OF_TEN.sub(r"e\1\2", text.translate(_MINUS))
    return _LATEX_SIGNS.sub("", _LATEX_TEXT.sub(r" \1 ", text))


def _normal(text: str) -> str:
    """An answer as text, without spaces, signs of money and percent, and text commands; 1 1/2 is not 11/2."""
    text = _LATEX_FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]}", text)
    text = _LATEX_SIGNS.sub("", _LATEX_TEXT.sub(r"\1", text)).translate(_MINUS)
    return re.sub(r"[ $%]", "", _MIXED.sub("_", text.strip())).rstrip(".")


def _number(text: str) -> Fraction | None:
    """Exact value of a plain number or fraction; None for anything else, and for texts over 64 characters."""
    text = re.sub(r"[$€£¥%]", "", text).strip().rstrip(".")
    if not text or len(text) > 64 or not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        if mixed := _MIXED_NUMBER.fullmatch(text):
            return int(f"{mixed[1]}1") * (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4])))
        return Fraction(top) / Fraction(bottom or "1")
    except (ValueError, ZeroDivisionError):
        return None
