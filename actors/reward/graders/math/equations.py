"""Equations that say what a name is: x = 5, f(x) = 2x, AB = 5, x = 1, y = 2, (x, y) = (1, 2)."""

import re
from typing import Final

from actors.reward.graders.math.latex import split_top
from actors.reward.graders.math.readings import EQUALS, LIST

_LETTER_NAME: Final = r"(?:\\(?!frac|sqrt)[A-Za-z]+|[A-Za-z])(?:_(?:\{[^{}]*\}|\w))?'*"
_NAME: Final = re.compile(
    rf"(?:m ?)?{_LETTER_NAME}(?:(?:\^\{{?-1\}}?)?\([^()]*\))?|[A-Z]{{2,3}}|\([a-z](?:,[a-z])+\)"
    rf"|\\(?:vec|overline|overrightarrow)\{{[A-Za-z]+\}}"
    r"|\\(?:angle|triangle) ?[A-Z]{1,3}|\\(?:text|mathrm|operatorname)\{[^{}]*\}|\\frac\{d[a-z]\}\{d[a-z]\}"
    rf"|\|(?:[A-Z]{{2}}|{_LETTER_NAME})\||\\(?:gcd|lcm|max|min|det|deg|arg) ?[({{\\].*"
    r"|\[[A-Z]{3,6}\]|(?:[EP]|\\mathbb\{[EP]\})\[[^\[\]]*\]|\\lim_.*"
    rf"|\\(?:sin|cos|tan|cot|sec|csc|ln|log) ?\(?(?:\\angle)? ?(?:{_LETTER_NAME}|[A-Z]{{3}})\)?"
    r"|[A-Za-z]{1,2}(?::[A-Za-z]{1,2})+"
)
_SUM: Final = re.compile(  # m + n = 5 and a/b = 5 answer 5, but as labels they are lines
    rf"{_LETTER_NAME}(?:\+{_LETTER_NAME})+|\\frac\{{(?:{_LETTER_NAME}|[A-Z]{{2}})\}}\{{(?:{_LETTER_NAME}|[A-Z]{{2}})\}}"
    rf"|(?:{_LETTER_NAME}|[A-Z]{{2}})/(?:{_LETTER_NAME}|[A-Z]{{2}})"
)


def is_equation(text: str) -> bool:
    return "=" in text and len(split_top(text, EQUALS)) > 1


def assignment(text: str, *, sums: bool = False) -> tuple[str, list[str]] | None:
    """Name and sides of x = 5, 5 = x, f(x) = 2x, x = 2 + 3 = 5; the name is "" in 2 + 3 = 5. None for x = 1, y = 2."""
    if len(split_top(text, LIST)) > 1 and len(EQUALS.findall(text)) > 1:
        return None
    sides = split_top(text, EQUALS)
    if len(sides) < 2:
        return None
    for name, values in ((sides[0], sides[1:]), (sides[-1], sides[:-1])):
        plain = name.replace(" ", "")
        if not plain or _NAME.fullmatch(plain) or (sums and _SUM.fullmatch(plain)):
            return plain, values
    return "", sides


def solution(text: str) -> dict[str, str]:
    """Values of x = 1, y = 2 and of x = y = 1 by their names, which are different letters; else empty."""
    found = [split_top(part, EQUALS) for part in split_top(text, LIST) if part]
    pairs = [(name, part[-1]) for part in found for name in part[:-1]]
    values = dict(pairs)
    letters = all(len(name) == 1 and name.isalpha() for name in values) and len(values) == len(pairs)
    return values if letters and len(pairs) > 1 and all(len(part) > 1 for part in found) else {}


def named_tuple(text: str) -> tuple[list[str], str]:
    """Names and values of (x, y) = (1, 2); another text as it is, without names."""
    assigned = assignment(text)
    if assigned and assigned[0].startswith("("):
        return assigned[0].strip("()").split(","), assigned[1][-1]
    return [], text


def same_name(ours: str, theirs: str) -> bool:
    return ours.replace("{", "").replace("}", "") == theirs.replace("{", "").replace("}", "")
