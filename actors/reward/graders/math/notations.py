r"""Numbers of another base, times of day, scores, dates and ratios: 1010_2, 5:00 p.m., 5 to 0, 2020-01-02, 3:1."""

import re
from fractions import Fraction
from typing import Final, NamedTuple

from actors.reward.graders.math.arithmetic import exact_value
from actors.reward.graders.math.latex import NUMBERS, balanced, split_top, without_text_commands
from actors.reward.graders.math.units import Quantity, quantity

_BASE: Final = re.compile(r"\(?(\d[\dA-Fa-f]*|[A-F][\dA-F]+)\)?(?:_\{? ?\(?(?:base )?(\w+)\)? ?\}?| ?\(?base (\w+)\)?)")
_TIME: Final = re.compile(r"(\d{1,2})(?::(\d\d))? *(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_CLOCK: Final = re.compile(r"\d{1,2} ?: ?[0-5]\d(?: ?: ?[0-5]\d)?")
_HOURS: Final = re.compile(r"(\d{1,2}) ?h ?([0-5]\d)")  # 9h30
_SIGNS: Final = re.compile(r":|\bto\b|\d ?[-h] ?\d|\d([./])\d+\1\d")
_COLON: Final = re.compile(":")
_TO: Final = re.compile(" to ")
_PLAIN: Final = r"\d+(?:\.\d+)?(?: ?: ?\d+)*"
_CHAIN: Final = re.compile(rf"{_PLAIN} ?- ?{_PLAIN}(?: ?- ?{_PLAIN})*|\d+(?P<point>[./])\d+(?:(?P=point)\d+)+")
# What algebra would multiply: a time, a ratio with 0, and numbers with a word between them, such as 5 vs 0
_NO_PRODUCT: Final = re.compile(
    r"(?<![\d.])\d{1,2} ?: ?[0-5]\d(?!\d)|(?<![\d.])0+ ?: ?\d|\d ?: ?0+(?![\d.])| to "
    r"|\d ?(?:[A-Za-z]{3,}|to|vs\.?|of|x) ?\d|\d[.]\d+[.]\d"
)
MAX_DIGITS: Final = 1_000  # of a number in another base


def by_base(ours: str, theirs: str) -> bool | None:
    """1010_2 equals 1010_{2}, 1010 and the number 10, but not 1010_3. A label with a base asks for its digits."""
    left, right = _based(ours), _based(theirs)
    if left and right:
        return left == right
    if right:
        return without_text_commands(ours).strip().upper() == right[0]
    if left is None:
        return None
    digits, base = left
    if not 2 <= base <= 36 or len(digits) > MAX_DIGITS or any(int(digit, 36) >= base for digit in digits):
        return False
    return exact_value(theirs) == int(digits, base)


def _based(text: str) -> tuple[str, int] | None:
    """Digits and base of 1010_2, (1010)_{two}, 1010 (base 2); None for another text."""
    if "_" not in text and "base" not in text:
        return None
    match = _BASE.fullmatch(without_text_commands(text).strip())
    base = (match[2] or match[3]) if match else ""
    if match is None or not (base in NUMBERS or (base.isdigit() and len(base) < 3)):
        return None
    if match[1][0].isalpha() and base not in ("16", "sixteen"):
        return None  # a name, or a product
    return match[1].upper(), NUMBERS.get(base) or int(base)


def by_time(ours: str, theirs: str) -> bool | None:
    """5:00 p.m. equals 5 PM, 17:00 and 5:00."""
    left, right = (_TIME.fullmatch(without_text_commands(text).strip()) for text in (ours, theirs))
    if not (left and right and (left[3] or right[3])) or not all(match[2] or match[3] for match in (left, right)):
        return None
    if int(left[2] or 0) != int(right[2] or 0):
        return False
    hours = int(left[1]), int(right[1])
    if left[3] and right[3]:
        return hours[0] % 12 == hours[1] % 12 and left[3].lower() == right[3].lower()
    named, plain = (left, hours[1]) if left[3] else (right, hours[0])
    return plain in (int(named[1]), int(named[1]) % 12 + 12 * (named[3].lower() == "p"))


class _Series(NamedTuple):
    """Terms of a text such as 3:1, 5 to 0, 10-15 or 1/2/2020."""

    sign: str  # ":", "to", "-", "/" or "."
    terms: list[str]
    is_clock: bool = False


def by_terms(ours: str, theirs: str) -> bool | None:
    """Compare texts whose terms have an order: times 9:30, scores 5 to 0, ranges 10-15, dates 1/2/2020, ratios 3:1.

    Two times are equal only as times. A ratio equals its multiples, unless it has a term 0. All else is compared term
    by term. A label that is such a text is not equal to any number: 5-3 as a label is a score, and as an answer to 2
    it is arithmetic.
    """
    if not (_SIGNS.search(ours) or _SIGNS.search(theirs)):
        return None
    ours, theirs = (without_text_commands(text).strip() for text in (ours, theirs))
    sides = quantity(ours), quantity(theirs)
    left, right = _series(sides[0].number), _series(sides[1].number)
    if left is None or right is None:
        return _by_one_series(left, right, sides[1] if left else sides[0])
    if sides[0].unit and sides[1].unit and sides[0].unit != sides[1].unit:
        return False
    if left.sign != right.sign and {left.sign, right.sign} not in ({":", "to"}, {"-", "to"}):
        return False
    if len(left.terms) != len(right.terms) or (right.is_clock and not left.is_clock):
        return False
    if left.sign == right.sign == ":" and not (left.is_clock and right.is_clock):
        return _same_ratio(_values(left.terms), _values(right.terms))
    return all(_same_term(*pair) for pair in zip(left.terms, right.terms, strict=True))


def is_series(text: str) -> bool:
    """Whether a text in the form of `latex.normal` is a time, a score, a range, a date or a ratio, not one number."""
    return _SIGNS.search(text) is not None and _series(without_text_commands(text).strip()) is not None


def is_no_product(text: str) -> bool:
    """Whether a text is a time, a score or a count, which algebra would read as a product."""
    return _NO_PRODUCT.search(text) is not None


def _by_one_series(left: _Series | None, right: _Series | None, other: Quantity) -> bool | None:
    """A ratio equals its quotient, 1:2 is 1/2, but no whole number; 5-3 and 8/2/2 are arithmetic as an answer only."""
    found = left or right
    if found is None or (left and left.sign in "-/"):
        return None
    if found.sign != ":" or found.is_clock or 0 in _values(found.terms):
        return False
    value = exact_value(other.number)
    return False if value is not None and value.denominator == 1 and not other.percent else None


def _series(text: str) -> _Series | None:
    """The terms of a text; None for a text that is no series of numbers."""
    if hours := _HOURS.fullmatch(text):
        return _Series(":", [hours[1], hours[2]], is_clock=True)
    if chain := _CHAIN.fullmatch(text):
        sign = chain["point"] or "-"
        return _Series(sign, [term.strip() for term in text.split(sign)])
    if text.startswith("(") and text.endswith(")") and balanced(text[1:-1]):
        text = text[1:-1].strip()
    for sign, pattern in (("to", _TO), (":", _COLON)):
        terms = split_top(text, pattern)
        if len(terms) > 1:
            numbers = all(_CLOCK.fullmatch(term) or exact_value(term) is not None for term in terms)
            return _Series(sign, terms, is_clock=_CLOCK.fullmatch(text) is not None) if numbers else None
    return None


def _values(terms: list[str]) -> list[Fraction]:
    return [value for term in terms if (value := exact_value(term)) is not None]


def _same_ratio(ours: list[Fraction], theirs: list[Fraction]) -> bool:
    if 0 in ours or 0 in theirs:
        return ours == theirs
    return all(a * theirs[0] == b * ours[0] for a, b in zip(ours, theirs, strict=True))


def _same_term(ours: str, theirs: str) -> bool:
    if ":" in ours and ":" in theirs:
        return by_terms(ours, theirs) is True
    value = exact_value(theirs)
    return value is not None and exact_value(ours) == value
