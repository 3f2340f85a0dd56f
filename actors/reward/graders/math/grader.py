r"""The graders `math` and `deepscaler`: whether the content of the last box equals the label by value."""

import re
from collections.abc import Callable, Sequence
from typing import Final, cast

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.labels import Label, text_of
from actors.reward.graders.math.algebra import TimeIsUp, cpu_limit, symbolically_equal
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.latex import is_text, normal, split_top, without_text_commands, words
from actors.reward.graders.math.units import Quantity, quantity

MAX_PARTS: Final = 200  # elements of a list or a matrix; answers with more are compared as text

_THOUGHT_END: Final = "</think>"
_RESPONSE: Final = "###Response"
_COMMA: Final = re.compile(r"[,;]")
_LIST: Final = re.compile(r"[,;]| ?\\(?:text|mathrm|mbox)\s*\{\s*,? ?(?:and|or)\s*\}| (?:and|or) ")
_UNION: Final = re.compile(r"\\cup(?![A-Za-z])|(?<=[\])}]) ?U ?(?=[\[({\\])")
_EQUALS: Final = re.compile(r"(?<![<>!\\:])=(?!=)")
_ONE_LETTER: Final = re.compile(
    r"(?:m?\\(?!frac|sqrt)[A-Za-z]+|\\(?:vec|overrightarrow)\{[A-Za-z]+\}|[A-Za-z])(?:_\{?\w+\}?)?'*(?:\(-?\w+\))?|[A-Z]{2,3}|\([a-z](?:,[a-z])+\)"
    r"|\\(?:text|mathrm|operatorname)\{[^{}]*\}|\|[A-Z]{2}\||\\frac\{d[a-z]\}\{d[a-z]\}"
)
_ELEMENT: Final = re.compile(r"^[A-Za-z] ?\\in(?![A-Za-z]) ?")
_MATRIX: Final = re.compile(
    r"\\begin\{(?P<kind>[pbBvV]?matrix|array|cases)\}(?:\{[lcr|]*\})?(?P<body>.*?)\\end\{(?P=kind)\}", re.DOTALL
)
_CHOICE: Final = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_LED: Final = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):])\s+(?![,;+\-*/=^_(<>&]|\\(?:cdot|cup|cap|pm)|and\b|or\b)\S")
_SPACED: Final = re.compile(r"[-+]?\d+(?: \d+)+")
_WORD: Final = re.compile(r"[a-z][a-z' -]*")
_SPACE: Final = re.compile(r"(?<!\d) | (?!\d)")
_LETTER: Final = re.compile(r"[A-Za-z]")
_BASE: Final = re.compile(r"(\d+)_\{?(\d+)\}?")
_BRACKETS: Final = {"(": ")", "[": "]", r"\{": r"\}", "{": "}", r"\langle": r"\rangle"}
_FBOX: Final = re.compile(r"\\(?:fbox|framebox)(?=\s*\{)")


def math(response: str, label: Label) -> float:
    r"""Compare the content of the last closed \boxed{...} (or \fbox{...}) of the response with the label by value.

    Numbers are compared exactly: 2^{53} and 2^{53}+1 differ, 1/2 = 0.5 = \frac12, 10^3 = 1000, 5! = 120, 2 million =
    2000000. 50\% equals both 50 and 0.5. Units must be equal where both have one. Words are compared as text, lists and
    unions in any order, tuples, intervals and matrices by element. A choice may have its text: (A) 5 is A. x=1, y=2 is
    (1,2). All else is compared by algebra (math-verify, extra `math`).

    Args:
        response: The whole response.
        label: The right answer, boxed or not; a number is taken as its text.

    Returns:
        1.0 if they are equal, else 0.0.

    Edges:
        A response without a box scores 0, as do an empty box, a box that is not closed, and an empty label or none. The
        last of several boxes counts, and the inner one of nested ones. An expression too large to compute (9**9**9**9)
        equals its own text alone. A comparison that takes over 5 s of CPU time scores 0; outside of a main thread,
        where no signal arrives, it has no such limit. Never raises.

    Source:
        slime's and verl's `math` and `deepscaler`; docs/reference/from-slime.md lists where they err.
    """
    truth = _truth(text_of(label))
    answer = last_boxed(_FBOX.sub(r"\\boxed", response))
    if answer is None or not normal(truth):
        return 0.0
    try:
        with cpu_limit():
            return float(equal_answers(answer, truth))
    except (TimeIsUp, RecursionError, MemoryError):
        return 0.0


def deepscaler(response: str, label: Label | Sequence[Label]) -> float:
    """Compare like `math`, but only what follows the last `</think>`, or else the first `###Response`.

    Args:
        response: The whole response.
        label: The right answer, or several of which one is enough.

    Returns:
        1.0 if one label is equal, else 0.0.

    Edges:
        A response with neither marker scores 0, and so does an empty list of labels. Never raises.

    Source:
        slime's `deepscaler`, which refuses lists; answers are compared as by `math`.
    """
    if _THOUGHT_END in response:
        solution = response.rpartition(_THOUGHT_END)[2]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0.0
    labels = label if isinstance(label, list | tuple) else (label,)
    return max((math(solution, cast("Label", each)) for each in labels), default=0.0)


def has_answer(label: str) -> bool:
    """Whether a label has an answer to compare with, in its box if it has one."""
    return bool(normal(_truth(label)))


def _truth(label: str) -> str:
    in_box = last_boxed(label)
    return label if in_box is None else in_box


def equal_answers(response: str, label: str) -> bool:
    """Whether two answers in LaTeX or plain text are equal, without the boxes around them."""
    ours, theirs = normal(response), normal(label)
    if not ours or not theirs:
        return False
    return _equal(ours, theirs)


def _equal(ours: str, theirs: str) -> bool:
    if _squeezed(ours) == _squeezed(theirs):
        return True
    rules: tuple[Callable[[str, str], bool | None], ...] = (
        _by_assignment, _by_base, _by_text, _by_quantity, _by_matrix, _by_union, _by_bracket, _by_list, _by_sign,
    )  # fmt: skip
    try:
        for rule in rules:
            verdict = rule(ours, theirs)
            if verdict is not None:
                return verdict
    except TooLargeError:
        return False
    if ours.count("'") != theirs.count("'") or _SPACED.fullmatch(ours) or _SPACED.fullmatch(theirs):
        return False  # x' is not x; 1 2 is neither 12 nor the mixed number that math-verify reads
    return symbolically_equal(without_text_commands(ours), without_text_commands(theirs))


def _squeezed(text: str) -> str:
    """Remove spaces, except between digits: 1 1/2 is not 11/2."""
    return _SPACE.sub("", text)


def _by_assignment(ours: str, theirs: str) -> bool | None:
    """x = 5 equals 5 and x = 5, but not y = 5. An equation that is not an assignment equals equations alone."""
    for solution, point in ((_solution(ours), theirs), (_solution(theirs), ours)):
        if solution and (at := _bracketed(_value_of_tuple(point))) and at[0] == "()" and len(at[1]) == len(solution):
            return all(map(_equal, solution, at[1]))
    left, right = _assignment(ours), _assignment(theirs)
    if left and right:
        return _same_name(left[0], right[0]) and _equal(left[1], right[1])
    if left and not _EQUALS.search(theirs):
        return _equal(left[1], theirs)
    if right and not _EQUALS.search(ours):
        return _equal(ours, right[1])
    equations = bool(_EQUALS.search(ours)), bool(_EQUALS.search(theirs))
    # A list of assignments equals a list of values; an equation in letters does not equal the value on its right
    return (
        None if equations[0] == equations[1] or len(split_top(ours if equations[0] else theirs, _LIST)) > 1 else False
    )


def _assignment(text: str) -> tuple[str, str] | None:
    """Name and value of x = 5, f(x) = 2x, or x = 2 + 3 = 5; None for other texts, such as x = 1, y = 2."""
    text = _ELEMENT.sub("x=", text)
    if len(split_top(text, _LIST)) > 1 and len(_EQUALS.findall(text)) > 1:
        return None
    parts = split_top(text, _EQUALS)
    name = parts[0].replace(" ", "")
    if len(parts) < 2 or not (_ONE_LETTER.fullmatch(name) or not _LETTER.search(name)):
        return None
    return name, parts[-1]


def _solution(text: str) -> list[str]:
    """Values of x = 1, y = 2, whose names are letters in the order of the alphabet; empty for another text."""
    found = [split_top(part, _EQUALS) for part in split_top(text, _LIST) if part]
    names = [part[0] for part in found]
    alphabetical = (
        len(names) > 1 and all(len(name) == 1 and name.isalpha() for name in names) and names == sorted({*names})
    )
    return [part[1] for part in found] if alphabetical and all(len(part) == 2 for part in found) else []


def _value_of_tuple(text: str) -> str:
    """(1, 2) of (x, y) = (1, 2); another text as it is."""
    assigned = _assignment(text)
    return assigned[1] if assigned and assigned[0].startswith("(") else text


def _same_name(ours: str, theirs: str) -> bool:
    return ours.replace("{", "").replace("}", "") == theirs.replace("{", "").replace("}", "")


def _by_base(ours: str, theirs: str) -> bool | None:
    """1010_2 equals 1010_{2} and 1010, but not 1010_3."""
    left, right = _BASE.fullmatch(ours), _BASE.fullmatch(theirs)
    if left and right:
        return left.groups() == right.groups()
    if right and not left:
        return ours.isdigit() and ours == right[1]
    return False if left and not right else None


def _by_text(ours: str, theirs: str) -> bool | None:
    """Words and choices are compared as text: "on" is not "no", (A) is A, and so is (A) with the text of the choice."""
    left, right = words(ours), words(theirs)
    letters = _choice(ours), _choice(theirs)
    if (letters[0] is None) != (letters[1] is None):
        led = _LED.match(without_text_commands(ours if letters[0] is None else theirs).strip())
        if led:
            return (led[1] or led[2]) == (letters[0] or letters[1] or "").upper()
    if letters[0] is not None and letters[1] is not None:
        # Case counts without brackets: a and A are two variables
        return letters[0] == letters[1] or ("(" in ours and letters[0].upper() == letters[1].upper())
    if left == right and (is_text(ours) or is_text(theirs)):
        return True
    if _is_words(ours) or _is_words(theirs):
        return left == right
    return None


def _choice(text: str) -> str | None:
    """Letter of an answer such as B, (B) or B.; None for any other answer."""
    match = _CHOICE.fullmatch(without_text_commands(text).strip())
    return match[1] if match else None


def _is_words(text: str) -> bool:
    r"""Whether an answer is words, not a product of letters: \text{yes}, no, Monday."""
    if is_text(text):
        plain = words(text)
        return bool(_WORD.fullmatch(plain)) and len(plain) > 1
    lower = text.strip().lower()
    if not _WORD.fullmatch(lower) or len(lower) < 2:
        return False
    return len(lower) > 3 or any(vowel in lower for vowel in "eiou") or " " in lower


def _by_quantity(ours: str, theirs: str) -> bool | None:
    """Compare numbers exactly, with their units; None if either is not a number."""
    left, right = quantity(ours), quantity(theirs)
    values = exact_value(left.number), exact_value(right.number)
    if values[0] is None or values[1] is None:
        return _by_unit(left, right, ours, theirs)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent == right.percent:
        return values[0] == values[1]
    if (right if left.percent else left).unit:
        return False
    percent, plain = (values[0], values[1]) if left.percent else (values[1], values[0])
    return plain in (percent, percent / 100)


def _by_unit(left: Quantity, right: Quantity, ours: str, theirs: str) -> bool | None:
    r"""Expressions with units, such as 2\pi cm: units must be equal, and are then dropped."""
    if (not left.unit and not right.unit) or (left.number == ours and right.number == theirs):
        return None
    if left.unit and right.unit and left.unit != right.unit:
        return False
    return _equal(left.number, right.number)


def _by_matrix(ours: str, theirs: str) -> bool | None:
    left, right = _MATRIX.fullmatch(ours), _MATRIX.fullmatch(theirs)
    if not left or not right:
        return None
    determinants = [match["kind"] in ("vmatrix", "Vmatrix") for match in (left, right)]
    if any(determinants) or "cases" in (left["kind"], right["kind"]):
        return None
    rows = [[row.split("&") for row in match["body"].split(r"\\") if row.strip()] for match in (left, right)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    pairs = [(a, b) for first, second in zip(*rows, strict=True) for a, b in zip(first, second, strict=True)]
    return len(pairs) <= MAX_PARTS and all(equal_answers(a, b) for a, b in pairs)


def _by_union(ours: str, theirs: str) -> bool | None:
    left, right = split_top(ours, _UNION), split_top(theirs, _UNION)
    if len(left) == len(right) == 1:
        return None
    return _in_any_order(left, right) or None


def _by_bracket(ours: str, theirs: str) -> bool | None:
    """Tuples and intervals by their brackets and elements in order; sets in any order."""
    left, right = _bracketed(ours), _bracketed(theirs)
    if left is None or right is None:
        return None
    if left[0] != right[0]:
        return False if len(left[1]) > 1 and len(right[1]) > 1 else None
    if len(left[1]) != len(right[1]):
        return False if left[0].startswith(r"\{") else None if 1 in (len(left[1]), len(right[1])) else False
    if left[0].startswith(r"\{"):
        return _in_any_order(left[1], right[1])
    if len(left[1]) == 1:
        return _equal(left[1][0], right[1][0])
    return len(left[1]) <= MAX_PARTS and all(_equal(a, b) for a, b in zip(left[1], right[1], strict=True))


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of (1, 2), [0, 1), \\{1, 2\\}; None for a text that no one pair of brackets encloses."""
    for opening in ("(", "[", r"\{", r"\langle"):
        if text.startswith(opening):
            closing = next((each for each in (r"\}", r"\rangle", ")", "]") if text.endswith(each)), "")
            if not closing or (opening in "([") != (closing in ")]"):
                return None
            inside = text[len(opening) : len(text) - len(closing)]
            return (opening + closing, split_top(inside, _COMMA)) if _balanced(inside) else None
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _by_list(ours: str, theirs: str) -> bool | None:
    """1, 2 equals 2, 1; x = 1 or x = 2 equals 1, 2; and a set equals its elements without braces."""
    left, right = (split_top(_without_braces(text), _LIST) for text in (ours, theirs))
    left, right = [part for part in left if part], [part for part in right if part]
    if len(left) == 1 and len(right) == 1:
        return None
    if len(left) != len(right):
        expanded = _expanded(left), _expanded(right)
        return _in_any_order(*expanded) if len(expanded[0]) == len(expanded[1]) else False
    return _in_any_order(left, right)


def _without_braces(text: str) -> str:
    if text.startswith(r"\{") and text.endswith(r"\}") and _balanced(text[2:-2]):
        return text[2:-2]
    return text


def _by_sign(ours: str, theirs: str) -> bool | None:
    r"""3 \pm 2 is the list 5, 1."""
    left, right = _expanded([ours]), _expanded([theirs])
    if len(left) == len(right) == 1:
        return None
    return _in_any_order(left, right)


def _expanded(parts: list[str]) -> list[str]:
    found: list[str] = []
    for part in parts:
        if part.count(r"\pm") == 1:
            found += [part.replace(r"\pm", sign) for sign in "+-"]
        else:
            found.append(part)
    return found


def _in_any_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether each element has a partner of its own in the other list."""
    if len(ours) != len(theirs) or len(ours) > MAX_PARTS:
        return False
    waiting = list(theirs)
    for part in ours:
        partner = next((index for index, other in enumerate(waiting) if _equal(part, other)), None)
        if partner is None:
            return False
        del waiting[partner]
    return True
