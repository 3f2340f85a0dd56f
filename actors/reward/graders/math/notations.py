r"""Numbers of another base, times of day and ratios: 1010_2, 5:00 p.m., 3:1."""

import re
from typing import Final

from actors.reward.graders.math.arithmetic import exact_value
from actors.reward.graders.math.latex import NUMBERS, split_top, without_text_commands

_BASE: Final = re.compile(r"\(?(\d[\dA-Fa-f]*|[A-F][\dA-F]+)\)?(?:_\{? ?\(?(?:base )?(\w+)\)? ?\}?| ?\(?base (\w+)\)?)")
_TIME: Final = re.compile(r"(\d{1,2})(?::(\d\d))? *(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_RATIO: Final = re.compile(r":| to |\\text\{ ?to ?\}")
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


def by_ratio(ours: str, theirs: str) -> bool | None:
    """3:1 equals 3 to 1 and 6:2."""
    parts = split_top(ours, _RATIO), split_top(theirs, _RATIO)
    if len(parts[0]) != len(parts[1]) or len(parts[0]) < 2:
        return None
    left, right = ([value for part in each if (value := exact_value(part)) is not None] for each in parts)
    if len(left) != len(right) or len(left) != len(parts[0]):
        return None
    return any(left) and any(right) and all(a * right[0] == b * left[0] for a, b in zip(left, right, strict=True))
