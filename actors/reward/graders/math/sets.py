r"""Sets of real numbers as pieces: x < 1 or x \ge 2, (-\infty,1)\cup[2,\infty), \{x \mid x < 4\}, ]0,1[."""

import re
from fractions import Fraction
from math import inf
from typing import Final, NamedTuple

from actors.reward.graders.math.arithmetic import exact_value
from actors.reward.graders.math.latex import balanced, split_top

OR: Final = re.compile(
    r"\\cup(?![A-Za-z])|(?<=[\])}]) ?U ?(?=[\[({\\])|\\lor(?![A-Za-z])|\\(?:text|mathrm|mbox) ?\{\s*,? ?or\s*\}| or "
)
_AND: Final = re.compile(r"[,;]|\\(?:text|mathrm|mbox) ?\{\s*,? ?and\s*\}| and ")
_BOTH: Final = re.compile(r"\\land(?![A-Za-z])|\\(?:text|mathrm|mbox) ?\{\s*,? ?and\s*\}| and ")
_RELATION: Final = re.compile(r"(\\[lg]e(?![A-Za-z])|\\ne(?![A-Za-z])|<|>)")
_BUILDER: Final = re.compile(
    r"\\\{ ?(\\?[A-Za-z]+)(?: ?\\in ?(?:\\mathbb\{R\}|R))? ?(?:\\mid(?![A-Za-z])|:|\|) ?(.*)\\\}"
)
_VARIABLE: Final = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?")
_CONSTANTS: Final = (r"\pi", r"\infty", "e")
_ELEMENT: Final = re.compile(r"([A-Za-z]) ?\\in(?![A-Za-z]) ?")
CAP: Final = re.compile(r"\\cap(?![A-Za-z])")
_TIMES: Final = re.compile(
    r"(?P<factor>-|-? ?(?:\d{1,9}(?:\.\d{1,9})?|\\frac\{\d{1,9}\}\{\d{1,9}\})) ?(?:\\cdot ?)?"
    r"(?P<name>[A-Za-z]|\\[a-z]+)"
)
_TURNED: Final = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_COMMA: Final = re.compile("[,;]")
_WITHOUT: Final = re.compile(
    r"(?:\\mathbb\{R\}|R|\(-\\infty, ?\\infty\)) ?\\setminus ?\\\{([^,;{}]*(?:\{[^{}]*\}[^,;{}]*)*)\\\}"
)
_LINE: Final = (r"\mathbb{R}", r"(-\infty,\infty)")


class Piece(NamedTuple):
    """An interval, or a point if both ends are the same closed one."""

    low: str
    has_low: bool
    high: str
    has_high: bool
    variable: str = ""  # of an inequality


def pieces(text: str) -> list[Piece] | None:
    """Return the intervals and points that a text in the form of `latex.normal` unites; None for another text.

    An intersection is computed if the ends of its two intervals are numbers; it may be empty.

    Raises:
        TooLargeError: such an end is too large to compute.
    """
    if (builder := _BUILDER.fullmatch(text)) and builder[1] not in _CONSTANTS:
        text = builder[2]
    if text == r"\emptyset":
        return []
    parts = split_top(text, OR)
    if r"\cap" in text:
        return _intersection(text)
    if len(parts) == 1 and not _RELATION.search(text):
        parts = split_top(text, _AND)  # (1,2), (3,4) lists two intervals; x > 1, x < 2 are one
    found: list[Piece] = []
    for part in parts:
        named = _ELEMENT.match(part)
        piece = _pieces_of(part[named.end() :] if named else part)
        if named:
            piece = [each._replace(variable=each.variable or named[1]) for each in piece]
        if not piece:
            return None
        found += piece
    return [*dict.fromkeys(found)] if len({piece.variable for piece in found} - {""}) <= 1 else None


def _intersection(text: str) -> list[Piece] | None:
    """What two intervals with numbers as ends, or two sets, have in common; None for all else."""
    parts = split_top(text, CAP)
    operands = [_pieces_of(part) for part in parts if balanced(part) and part[-1:] in ("]", ")", "}")]
    if len(parts) != 2 or len(operands) != 2 or not all(operands):
        return None
    if all(piece.low == piece.high for piece in (*operands[0], *operands[1])):
        return [piece for piece in operands[0] if piece in operands[1]]
    left, right = operands[0][0], operands[1][0]
    ends = [_end(end) for end in (left.low, left.high, right.low, right.high)]
    if len(operands[0]) + len(operands[1]) != 2 or None in ends:
        return None
    low = max((left, right), key=lambda piece: (_end(piece.low), not piece.has_low))
    high = min((left, right), key=lambda piece: (_end(piece.high), piece.has_high))
    found = Piece(low.low, low.has_low, high.high, high.has_high)
    first, last = _end(found.low), _end(found.high)
    if first is None or last is None or first > last or (first == last and not (found.has_low and found.has_high)):
        return []
    return [found]


def _end(text: str) -> Fraction | float | None:
    """Value of the end of an interval."""
    return {r"\infty": inf, r"-\infty": -inf}.get(text.replace(" ", ""), exact_value(text))


def says_set(text: str) -> bool:
    """Whether a text can only be a set of numbers: an inequality, a union, ]0,1[."""
    return (
        bool(_RELATION.search(text) or r"\cup" in text or r"\cap" in text or r"\setminus" in text)
        or text.startswith("]")
        or text.endswith("[")
    )


def connective(text: str) -> str:
    """The word between inequalities: "or", "and", or "" for another text."""
    for word, separator in (("or", OR), ("and", _BOTH)):
        parts = split_top(text, separator)
        if len(parts) > 1 and all(_RELATION.search(part) for part in parts):
            return word
    return ""


def _pieces_of(text: str) -> list[Piece]:
    sides = [side.strip() for side in _RELATION.split(text)]
    if len(sides) > 1:
        return _of_relation(sides)
    if without := _WITHOUT.fullmatch(text):
        point = without[1].strip()
        return [Piece(r"-\infty", False, point, False), Piece(point, False, r"\infty", False)]
    if text in _LINE:
        return [Piece(r"-\infty", False, r"\infty", False)]
    if text.startswith(r"\{") and text.endswith(r"\}") and balanced(text[2:-2]):
        return [Piece(point, True, point, True) for point in split_top(text[2:-2], _COMMA)]
    assigned = re.fullmatch(r"([A-Za-z]) ?= ?(.+)", text)
    if assigned and "=" not in assigned[2]:
        return [Piece(assigned[2], True, assigned[2], True, assigned[1])]
    ends = split_top(text[1:-1], _COMMA) if balanced(text[1:-1]) else []
    if len(ends) != 2 or text[0] not in "([]" or text[-1] not in ")][":
        return []
    return [Piece(ends[0], text[0] == "[", ends[1].removeprefix("+"), text[-1] == "]")]


def _of_relation(sides: list[str]) -> list[Piece]:
    """Pieces of x < 3, 3 > x, 1 < x \\le 3, x \\ne 0."""
    if len(sides) == 3:
        left, sign, right = sides
        if not (_is_variable(left) or _TIMES.fullmatch(left)):
            left, right, sign = right, left, _TURNED.get(sign, sign)
        if (times := _TIMES.fullmatch(left)) and times["name"] not in _CONSTANTS:  # 2x < 6 is x < 3
            factor = times["factor"] if times["factor"] != "-" else "-1"
            left, right = times["name"], f"({right})/({factor})"
            sign = _TURNED.get(sign, sign) if factor.startswith("-") else sign
        if not _is_variable(left):
            return []
        if sign == r"\ne":
            return [
                Piece(r"-\infty", False, right, False, left),
                Piece(right, False, r"\infty", False, left),
            ]
        if sign in ("<", r"\le"):
            return [Piece(r"-\infty", False, right, sign == r"\le", left)]
        return [Piece(right, sign == r"\ge", r"\infty", False, left)]
    if len(sides) != 5 or not _is_variable(sides[2]):
        return []
    low, first, variable, second, high = sides
    if {first, second} <= {">", r"\ge"}:
        low, first, second, high = high, second, first, low
    elif not {first, second} <= {"<", r"\le"}:
        return []
    return [Piece(low, first in (r"\le", r"\ge"), high, second in (r"\le", r"\ge"), variable)]


def _is_variable(text: str) -> bool:
    return (
        _VARIABLE.fullmatch(text) is not None
        and text not in _CONSTANTS
        and (len(text) == 1 or "\\" in text or "_" in text)
    )
