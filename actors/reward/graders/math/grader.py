r"""The graders `math` and `deepscaler`: whether the content of the last box equals the label by value."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final, TypeVar, cast

from actors.reward.graders.boxed import FBOX, last_boxed, stated
from actors.reward.graders.labels import Label, text_of
from actors.reward.graders.math.algebra import TimeIsUp, cpu_limit, symbolically_equal
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.equations import assignment, is_equation, named_tuple, same_name, solution
from actors.reward.graders.math.latex import (
    balanced,
    called,
    is_text,
    normal,
    split_top,
    without_text_commands,
    words,
)
from actors.reward.graders.math.notations import by_base, by_terms, by_time, is_no_product
from actors.reward.graders.math.readings import EQUALS, LIST, other_readings
from actors.reward.graders.math.sets import CAP, Piece, connective, pieces, says_set
from actors.reward.graders.math.units import Quantity, conversion, glued, quantity
from actors.reward.graders.responses import visible, without_turn_end

T = TypeVar("T")

MAX_CHARS: Final = 5_000  # of an answer; longer ones are compared as text
MAX_PARTS: Final = 200  # elements of a list or a matrix; answers with more are compared as text

_INTEGER: Final = re.compile(r"-?[0-9]{1,1000}")
_THOUGHT_END: Final = "</think>"
_RESPONSE: Final = "###Response"
_COMMA: Final = re.compile(r"[,;]")
_UNION: Final = re.compile(r"\\cup(?![A-Za-z])|(?<=[\])}]) ?U ?(?=[\[({\\])")
_ELEMENT: Final = re.compile(r"^([A-Za-z]) ?\\in(?![A-Za-z]) ?")
_MATRIX: Final = re.compile(
    r"\\begin\{(?P<kind>[pbBvV]?matrix|array|cases)\}(?:\{[lcr|]*\})?(?P<body>.*?)\\end\{(?P=kind)\}", re.DOTALL
)
_ARRAY: Final = re.compile(r"^[(\[] ?(\\begin\{array\}.*\\end\{array\}) ?[)\]]$", re.DOTALL)
_CHOICE: Final = re.compile(r"\(?\s*([A-Za-z])\s*[).]?")
_LED: Final = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):])\s+(?![,;+\-*/=^_(<>&]|\\(?:cdot|cup|cap|pm)|and\b|or\b)\S")
_LED_BY_LETTER: Final = re.compile(r"\\(?:text|textbf|mathrm) ?\{ ?\([A-Z]\) ?\} ?([^,;+\-*/=^_ ].*)", re.DOTALL)
_SPACED: Final = re.compile(r"[-+]?\d+(?: \d+)+")
_WORD: Final = re.compile(r"[a-z][a-z' -]*")
_SPACE: Final = re.compile(r"(?<!\d) | (?!\d)")
_SUCH_THAT: Final = re.compile(r"\\\{ ?([^|:,]+?) ?(?::|\||\\mid(?![A-Za-z])) ?(.+)\\\}")
_CAPITALS: Final = re.compile(r"[A-Z]{3,}")
_LETTERS: Final = re.compile(r"[A-H]{2,8}")
_POINT: Final = re.compile(r"^[A-Z](?:_\{?\w\}?)?'* ?(?=\()")
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")
_JOINS: Final = re.compile(r"\\l(?:and|or)(?![A-Za-z])")
_DROPPED: Final = re.compile(
    r"[EP]\}?\[[^\[\]]*\](?:\^\{?\w\}?)?"
    r"|\\frac\{(?:d|\\partial )[a-z]\}\{(?:d|\\partial )[a-z]\}|\^(?=T|\{T\}|\{?\\top(?![A-Za-z]))"
)
_CAPITAL: Final = re.compile(r"\\[A-Z][a-z]+")
_BOARD: Final = re.compile(r"\\mathbb\{([A-Z])\}")
_PLUS_MINUS: Final = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_AFTER_NUMBER: Final = re.compile(r"\d ?\\(?:pm|mp)(?![A-Za-z])")
_RESIDUE: Final = re.compile(r"(?:[A-Za-z] ?\\equiv ?)?([^=]*?) ?\\pmod ?\{?\w+\}?")
_FOR_ALL: Final = re.compile(r",? ?(?:\\text ?\{[ ,]*)?(?<![A-Za-z])(?:for (?:all|any|every|each)|where)(?![A-Za-z]).*")
_ANGLE: Final = re.compile(r"(\\angle ?[A-Z])([A-Z])([A-Z])")
_RADIANS: Final = r"\cdot\frac{\pi}{180}"


def math(response: str, label: Label) -> float:
    r"""Compare the content of the last closed \boxed{...} (or \fbox{...}) of the response with the label by value.

    Numbers are compared exactly: 2^{53} and 2^{53}+1 differ, 1/2 = 0.5 = \frac12, 10^3 = 1000, 5! = 120, 2 million =
    2000000, 0.333... = 1/3. 50\% equals both 50 and 0.5. Units must be of one quantity where both have one: 1 hour is
    60 minutes. Words are compared as text, lists and unions in any order, tuples, intervals and matrices by element. A
    choice may have its text: (A) 5 is A. x=1, y=2 is (1,2). 7 ft 6 in is 7.5 ft. 0,5 is 0.5 if the label is 0.5. An
    inequality is its interval, 1010_2 is 10, "forty-two" is 42, "no solution" the empty set. Two times of day (9:30)
    are equal only as times; a to b, a-b and a text with a term 0 only term by term; other texts with a colon are
    ratios: 3:1 is 6:2. An equation equals a value if its sides do, but for a name: m+n=5 and a/b=5 are 5, 8=5 and xy=5
    are not. One value said twice (2/5 or 40\%) is that value. A sentence before the answer such as "The value of n is"
    or "Total:" does not count. 5cm is 5 \text{ cm}, but 5m is 5 only beside a label in m. All else is compared by
    algebra (math-verify, extra `math`).

    Args:
        response: The whole response.
        label: The right answer, boxed, after "####" or alone; a number is taken as its text.

    Returns:
        1.0 if they are equal, else 0.0.

    Edges:
        A response without a box scores 0, as do an empty box, a last box that is not closed, an empty label and none.
        The last of several boxes counts, and the inner one of nested ones; \boxed 42 is a box too. Characters without a
        width do not count. Where two readings of a text disagree, it is not equal: 10:20 as a label is a time. Answers
        of over 5,000 characters equal the same text alone, and so does an expression too large to compute (9**9**9**9);
        x^{2020}+1 is not. An approximation, as in \pi \approx 3.14, is read only if it rounds the value before it. A
        comparison that takes over 5 s of CPU time scores 0; outside of a main thread, where no signal arrives, it has
        no such limit. Never raises.

    Source:
        slime's and verl's `math` and `deepscaler`; docs/reference/from-slime.md lists where they err.
    """
    truth = stated(visible(text_of(label)))
    answer = last_boxed(FBOX.sub(r"\\boxed", visible(without_turn_end(response))))
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
    return bool(normal(stated(visible(label))))


def equal_answers(response: str, label: str) -> bool:
    """Whether two answers in LaTeX or plain text are equal, without the boxes around them."""
    if max(len(response), len(label)) > MAX_CHARS:
        return response.split() == label.split()
    if _INTEGER.fullmatch(response) and _INTEGER.fullmatch(label):
        return int(response) == int(label)
    ours, theirs = normal(response), normal(label)
    if not ours or not theirs:
        return False
    if _equal(ours, theirs):
        return True
    others = other_readings(response, label, ours, theirs)
    return any(all(_equal(*pair) for pair in reading) for reading in others)


def _equal(ours: str, theirs: str) -> bool:
    if _squeezed(ours) == _squeezed(theirs):
        return True
    if {*_JOINS.findall(ours)} ^ {*_JOINS.findall(theirs)} == {r"\land", r"\lor"}:
        return False
    ours, theirs = called(ours), called(theirs)
    rules: tuple[Callable[[str, str], bool | None], ...] = (
        _by_pieces, _by_assignment, by_base, by_time, by_terms, _by_text, _by_quantity, _by_matrix, _by_union,
        _by_bracket, _by_list, _by_sign,
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
    if _swapped(ours, theirs) or is_no_product(ours) or is_no_product(theirs):
        return False
    if r"\ldots" in ours or r"\ldots" in theirs or _CAPITAL.findall(ours) != _CAPITAL.findall(theirs):
        return False  # math-verify drops the dots, and takes \Pi for \pi
    if sorted(_DROPPED.findall(ours)) != sorted(_DROPPED.findall(theirs)):
        return False  # it takes A^T for A, dy/dx for dx/dy, and E[X^2] for E[X]^2
    return symbolically_equal(without_text_commands(ours), without_text_commands(theirs))


def _swapped(ours: str, theirs: str) -> bool:
    """Whether one has X where the other has x: math-verify takes them for one variable."""
    left, right = (set(_COMMAND.sub("", text)) for text in (ours, theirs))
    return any(letter.swapcase() in right - left for letter in left - right if letter.isalpha())


def _squeezed(text: str) -> str:
    r"""Remove spaces, except between digits (1 1/2 is not 11/2). \mathbb{R} is R, \{x: x>1\} has a bar, ABC is CBA."""
    if text.startswith(r"\{"):
        text = text.replace(r"\mid", ":").replace("|", ":")
    elif text.startswith(r"\angle") and (angle := _ANGLE.fullmatch(text)) and angle[1][-1] > angle[3]:
        text = rf"\angle {angle[3]}{angle[2]}{angle[1][-1]}"
    return _BOARD.sub(r"\1", _SPACE.sub("", text))


def _by_assignment(ours: str, theirs: str) -> bool | None:
    """x = 5 equals 5 and x = 5, but not y = 5. An equation that is not an assignment equals equations alone."""
    ours, theirs = _ELEMENT.sub(r"\1=", ours), _ELEMENT.sub(r"\1=", theirs)
    if (residue := _RESIDUE.fullmatch(ours)) and exact_value(theirs) is not None:  # 109 (mod 1000) answers 109
        return _equal(residue[1], theirs)
    equations = is_equation(ours), is_equation(theirs)
    if not any(equations):
        return None
    ours, theirs = _FOR_ALL.sub("", ours) or ours, _FOR_ALL.sub("", theirs) or theirs
    for values, point in ((solution(ours), theirs), (solution(theirs), ours)):
        names, text = named_tuple(point)
        names = names or sorted(values)
        at = _bracketed(text) if values else None
        others = at[1] if at and at[0] == "()" else split_top(point, LIST)
        if len(values) == len(others) and not is_equation(others[0]) and (text != point or names == [*values]):
            return {*names} == {*values} and all(
                _equal(values[name], other) for name, other in zip(names, others, strict=True)
            )
    left, right = assignment(ours), assignment(theirs)
    if left and right and left[0] and right[0]:
        if same_name(left[0], right[0]):
            return all(_equal(side, right[1][-1]) for side in left[1])
        return None if left[0] in right[1][-1] or right[0] in left[1][-1] else False  # y = x is x = y
    if all(equations):
        return None
    sums = assignment(ours, sums=True)
    stated, value = (sums, theirs) if equations[0] else (right, ours)
    if stated:
        return all(_equal(side, value) for side in stated[1])
    # A list of assignments equals a list of values
    return None if len(split_top(ours if equations[0] else theirs, LIST)) > 1 else False


def _by_text(ours: str, theirs: str) -> bool | None:
    """Words and choices are compared as text: "on" is not "no", (A) is A, and so is (A) with the text of the choice."""
    left, right = words(ours), words(theirs)
    letters = _choice(ours), _choice(theirs)
    if (letters[0] is None) != (letters[1] is None):
        led = _LED.match(without_text_commands(ours if letters[0] is None else theirs).strip())
        if led:
            return (led[1] or led[2]) == (letters[0] or letters[1] or "").upper()
    led = [_LED_BY_LETTER.match(text) for text in (ours, theirs)]
    if bool(led[0]) != bool(led[1]):  # (B) 3/2 is 3/2
        texts = (match[1] if match else text for match, text in zip(led, (ours, theirs), strict=True))
        return _equal(*texts) or None
    if letters[0] is not None and letters[1] is not None:
        # Case counts without brackets: a and A are two variables
        return letters[0] == letters[1] or ("(" in ours and letters[0].upper() == letters[1].upper())
    if left == right and (is_text(ours) or is_text(theirs)):
        return True
    if ours != theirs and _CAPITALS.fullmatch(ours) and _CAPITALS.fullmatch(theirs):
        return False  # HTH is not HHT, but AB is the segment BA
    if _is_words(ours) or _is_words(theirs):
        lists = [split_top(without_text_commands(text), LIST) for text in (ours, theirs)]
        return left == right or (min(map(len, lists)) > 1 and _in_any_order(*lists))
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
    values = exact_value(called(left.number)), exact_value(called(right.number))
    if (values[0] is None) != (values[1] is None):
        left, right = (glued(ours, right), right) if values[0] is None else (left, glued(theirs, left))
        values = exact_value(left.number), exact_value(right.number)
    if values[0] is None or values[1] is None:
        return _by_unit(left, right, ours, theirs)
    ratio = conversion(left.unit, right.unit) if left.unit and right.unit else Fraction(1)
    if ratio is None or (ratio != 1 and (left.percent or right.percent)):
        return False
    if left.percent == right.percent:
        return values[0] * ratio == values[1]
    if (right if left.percent else left).unit:
        return False
    percent, plain = (values[0], values[1]) if left.percent else (values[1], values[0])
    return plain in (percent, percent / 100)


def _by_unit(left: Quantity, right: Quantity, ours: str, theirs: str) -> bool | None:
    r"""Expressions with units, such as 2\pi cm: units must be of one quantity, and are then dropped."""
    if (not left.unit and not right.unit) or (left.number == ours and right.number == theirs):
        return None
    ratio = conversion(left.unit, right.unit) if left.unit and right.unit else Fraction(1)
    if ratio is None:
        return False
    if ratio != 1:
        return _equal(rf"({left.number})\cdot({ratio})", right.number)
    for angle, other in ((left, right), (right, left)):
        if angle.unit == "degree" and not other.unit and r"\pi" in other.number:
            return _equal(angle.number + _RADIANS, other.number)
    return _equal(left.number, right.number)


def _by_matrix(ours: str, theirs: str) -> bool | None:
    left, right = (_MATRIX.fullmatch(_ARRAY.sub(r"\1", text)) for text in (ours, theirs))
    if not left or not right:
        return _by_vector(left or right, theirs if left else ours) if left or right else None
    determinants = [match["kind"] in ("vmatrix", "Vmatrix") for match in (left, right)]
    if any(determinants) or "cases" in (left["kind"], right["kind"]):
        return None
    rows = [[row.split("&") for row in match["body"].split(r"\\") if row.strip()] for match in (left, right)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    pairs = [(a, b) for first, second in zip(*rows, strict=True) for a, b in zip(first, second, strict=True)]
    return len(pairs) <= MAX_PARTS and all(equal_answers(a, b) for a, b in pairs)


def _by_vector(matrix: re.Match[str] | None, text: str) -> bool | None:
    """A column is a tuple: (1,2)."""
    elements = _bracketed(text)
    if matrix is None or elements is None or elements[0] != "()" or "&" in matrix["body"]:
        return None
    rows = [row.strip() for row in matrix["body"].split(r"\\") if row.strip()]
    return len(rows) == len(elements[1]) <= MAX_PARTS and all(map(_equal, rows, elements[1]))


def _by_pieces(ours: str, theirs: str) -> bool | None:
    r"""x < 1 or x \ge 2 equals (-\infty,1)\cup[2,\infty), and ]0,1[ equals (0,1)."""
    if not (says_set(ours) or says_set(theirs)):
        return None
    if {connective(ours), connective(theirs)} == {"and", "or"}:
        return False
    left, right = pieces(ours), pieces(theirs)
    if left is None or right is None:
        return None
    if len({piece.variable for piece in (*left, *right)} - {""}) > 1:
        return False
    return _matched(left, right, _same_piece) or None  # (0,1] with (1,2] is (0,2] too: algebra decides


def _same_piece(ours: Piece, theirs: Piece) -> bool:
    closed = (ours.has_low, ours.has_high) == (theirs.has_low, theirs.has_high)
    return closed and _equal(ours.low, theirs.low) and _equal(ours.high, theirs.high)


def _by_union(ours: str, theirs: str) -> bool | None:
    for separator in (_UNION, CAP):
        left, right = split_top(ours, separator), split_top(theirs, separator)
        if len(left) > 1 and _in_any_order(left, right):
            return True
    return None


def _by_bracket(ours: str, theirs: str) -> bool | None:
    """Tuples and intervals by their brackets and elements in order; sets in any order."""
    left, right = _bracketed(ours), _bracketed(theirs)
    if left is None or right is None:
        return _by_one_bracket(left or right, theirs if left else ours) if left or right else None
    sets = [each[0].startswith(r"\{") for each in (left, right)]
    if sets == [True, True]:
        builders = [_SUCH_THAT.fullmatch(text) for text in (ours, theirs)]
        if builders[0] and builders[1]:
            return _equal(builders[0][1], builders[1][1]) and _equal(builders[0][2], builders[1][2])
        return _same_set(_expanded(left[1]), _expanded(right[1]))
    if any(sets) and len((left if sets[0] else right)[1]) == 1:
        return _equal(left[1][0], theirs) if sets[0] else _equal(ours, right[1][0])
    if left[0] != right[0]:
        return False if len(left[1]) > 1 and len(right[1]) > 1 else None
    if len(left[1]) != len(right[1]):
        return None if 1 in (len(left[1]), len(right[1])) else False
    if len(left[1]) == 1:
        return _equal(left[1][0], right[1][0])
    return len(left[1]) <= MAX_PARTS and all(_equal(a, b) for a, b in zip(left[1], right[1], strict=True))


def _by_one_bracket(bracketed: tuple[str, list[str]] | None, text: str) -> bool | None:
    """A tuple equals P(1,2), and 1,2 in its order."""
    if bracketed is None or bracketed[0] != "()" or len(bracketed[1]) < 2:
        return None
    if (named := _POINT.match(text)) and (point := _bracketed(text[named.end() :])):
        elements = point[1]
    else:
        elements = split_top(text, _COMMA)
    if not 1 < len(elements) == len(bracketed[1]) <= MAX_PARTS or any(EQUALS.search(each) for each in elements):
        return None
    return all(map(_equal, elements, bracketed[1])) or None


def _same_set(ours: list[str], theirs: list[str]) -> bool:
    """Whether each element of one set is in the other: an element counts once."""
    if len(ours) > MAX_PARTS or len(theirs) > MAX_PARTS:
        return False

    def same(part: str, other: str) -> bool:  # the set of 1 is not the number 1
        return part.startswith(r"\{") == other.startswith(r"\{") and _equal(part, other)

    return all(any(same(part, other) for other in theirs) for part in ours) and all(
        any(same(part, other) for part in ours) for other in theirs
    )


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of (1, 2), [0, 1), \\{1, 2\\}; None for a text that no one pair of brackets encloses."""
    for opening in ("(", "[", r"\{", r"\langle"):
        if text.startswith(opening):
            closing = next((each for each in (r"\}", r"\rangle", ")", "]") if text.endswith(each)), "")
            if not closing or (opening in "([") != (closing in ")]"):
                return None
            inside = text[len(opening) : len(text) - len(closing)]
            kind = "()" if closing == r"\rangle" else opening + closing
            return (kind, split_top(inside, _COMMA)) if balanced(inside) else None
    return None


def _by_list(ours: str, theirs: str) -> bool | None:
    """1, 2 equals 2, 1; x = 1 or x = 2 equals 1, 2; and a set equals its elements without braces. AC is A, C."""
    left, right = (split_top(_without_braces(text), LIST) for text in (ours, theirs))
    left, right = [part for part in left if part], [part for part in right if part]
    if len(left) == 1 and len(right) == 1:
        return None
    if len(left) != len(right):
        letters = [
            list(parts[0]) if len(parts) == 1 and _LETTERS.fullmatch(parts[0]) else parts for parts in (left, right)
        ]
        expanded = _expanded(letters[0]), _expanded(letters[1])
        return _in_any_order(*expanded) if len(expanded[0]) == len(expanded[1]) else False
    return _in_any_order(left, right)


def _without_braces(text: str) -> str:
    text = without_text_commands(text).strip() if is_text(text) else text
    if text.startswith(r"\{") and text.endswith(r"\}") and balanced(text[2:-2]):
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
        signs = _PLUS_MINUS.findall(part)
        if len(signs) == 1:
            # 3 + -2, since 3 - 2 as a label is a score
            minus = "+-" if _AFTER_NUMBER.search(part) else "-"
            found += [_PLUS_MINUS.sub(sign, part) for sign in ("+", minus)]
        else:
            found.append(part)
    return found


def _in_any_order(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return _matched(ours, theirs, _equal)


def _matched(ours: Sequence[T], theirs: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether each element has a partner of its own in the other list."""
    if len(ours) != len(theirs) or len(ours) > MAX_PARTS:
        return False
    waiting = list(theirs)
    for part in ours:
        partner = next((index for index, other in enumerate(waiting) if same(part, other)), None)
        if partner is None:
            return False
        del waiting[partner]
    return True
