r"""Exact value of a written number: 1/2, \frac12, 10^3, 5!, \sqrt{4}, 2 million, 0.\overline{3}, 1\frac{1}{2}."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Final

MAX_BITS: Final = 20_000  # of a numerator or a denominator
MAX_CHARS: Final = 5_000
MAX_DEPTH: Final = 50
MAX_DIGITS: Final = 4_000  # Python reads 4,300
MAX_FACTORIAL: Final = 2050

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<repeats>\\overline\s*\{\d+\}|\\dot\s*\{\d\})?(?P<exponent>[eE][-+]?\d+)?"
    r"|(?P<command>\\(?:frac|sqrt|cdot|binom|max|min|gcd|lcm)(?![A-Za-z])|[CP](?=\())|(?P<brace>\\[{}]|,)"
    r"|(?P<word>hundred|thousand|million|billion|trillion|dozen)s?(?![A-Za-z])"
    r"|(?P<sign>\*|[-+/^!(){}\[\]]))"
)
_WORDS: Final = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip


class TooLargeError(Exception):
    """A number has more than MAX_BITS bits."""


class _NotNumberError(Exception):
    """A text is not a number."""


def exact_value(text: str) -> Fraction | None:
    """Return the value of a text of digits, signs, roots and factorials; None for any other text.

    Roots count only where they are rational. The text is in the form of `latex.normal`.

    Raises:
        TooLargeError: the value, or one on the way to it, has more than 20,000 bits. It is found before it is computed.
    """
    if len(text) > MAX_CHARS:
        return None
    try:
        reader = _Reader(text)
        value = reader.sum()
        return value if reader.at_end() else None
    except (_NotNumberError, ZeroDivisionError):
        return None


class _Reader:
    """A recursive-descent reader of sums, products, powers and factorials."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0
        self._depth = 0

    def at_end(self) -> bool:
        return self._next == len(self._tokens)

    def sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotNumberError
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            right = self._product()
            value = _bounded(value + right if sign == "+" else value - right)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while not self.at_end():
            if self._take("*", r"\cdot") is not None:
                value = _bounded(value * self._signed())
            elif self._take("/") is not None:
                value = _bounded(value / self._signed())
            elif self._peek() in _WORDS:
                value = _bounded(value * _WORDS[self._pop()])
            elif self._peek() in ("(", r"\sqrt", r"\binom") or self._peek() in _OF_SEVERAL:
                value = _bounded(value * self._power())
            else:
                break
        return value

    def _signed(self) -> Fraction:
        sign = self._take("+", "-")
        value = self._signed() if sign is not None else self._power()
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._factorial()
        if self._take("^") is None:
            return base
        return _power(base, self._signed())

    def _factorial(self) -> Fraction:
        value = self._atom()
        step = 0
        while self._take("!") is not None:
            step += 1
        return _factorial(value, step) if step else value

    def _atom(self) -> Fraction:
        token = self._pop()
        if token in ("(", "{", "["):
            value = self.sum()
            self._expect({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == r"\frac":
            return _bounded(self._argument() / self._argument())
        if token == r"\binom":
            return _binomial(self._argument(), self._argument())
        if token in _OF_SEVERAL:
            return self._of_several(token)
        if token == r"\sqrt":
            degree = Fraction(2)
            if self._take("[") is not None:
                degree = self.sum()
                self._expect("]")
            return _root(self._argument(), degree)
        value = _literal(token)
        if self._peek() == r"\frac" and value.denominator == 1:  # a mixed number
            return _bounded(value + self._atom())
        return value

    def _of_several(self, name: str) -> Fraction:
        r"""Value of \max\{3,8\}, \gcd(12,18), C(5,2) behind its name."""
        opening = self._take("(", r"\{")
        values = [self.sum()]
        while self._take(",") is not None:
            values.append(self.sum())
        self._expect(")" if opening == "(" else r"\}")
        if len(values) < 2 or (name in "CP" and (len(values) > 2 or opening != "(")):
            raise _NotNumberError
        return _bounded(_OF_SEVERAL[name](values))

    def _argument(self) -> Fraction:
        r"""Argument of a command: a group, or one digit (\frac12)."""
        token = self._peek()
        if token == "{" or token.startswith("\\"):
            return self._atom()
        if token[:1].isdigit():
            self._pop()
            if len(token) > 1:
                self._tokens.insert(self._next, token[1:])
            return _literal(token[0])
        raise _NotNumberError

    def _peek(self) -> str:
        return "" if self.at_end() else self._tokens[self._next]

    def _pop(self) -> str:
        if self.at_end():
            raise _NotNumberError
        self._next += 1
        return self._tokens[self._next - 1]

    def _take(self, *wanted: str) -> str | None:
        return self._pop() if self._peek() in wanted and not self.at_end() else None

    def _expect(self, token: str) -> None:
        if self._pop() != token:
            raise _NotNumberError


_MIXED: Final = re.compile(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])")


def _tokens(text: str) -> list[str]:
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text.strip())
    found: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotNumberError
        token = match[0].strip()
        if found and _is_number(token) and _is_number(found[-1]):
            raise _NotNumberError  # "1 2" is not a number
        found.append(match["word"] or token)
        position = match.end()
    return found


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


_LITERAL: Final = re.compile(
    r"(?P<whole>\d*)(?:\.(?P<part>\d*))?(?:\\(?:overline|dot)\s*\{(?P<repeats>\d+)\})?(?:[eE](?P<exponent>[-+]?\d+))?"
)


def _literal(token: str) -> Fraction:
    match = _LITERAL.fullmatch(token)
    if match is None or not (match["whole"] or match["part"]):
        raise _NotNumberError
    part = match["part"] or ""
    digits = (match["whole"] or "0") + part
    if len(digits) > MAX_DIGITS or len(match["repeats"] or "") > MAX_DIGITS:
        raise TooLargeError
    value = Fraction(int(digits), 10 ** len(part))
    if repeats := match["repeats"]:
        if match["part"] is None:
            raise _NotNumberError
        value += Fraction(int(repeats), (10 ** len(repeats) - 1) * 10 ** len(part))
    if exponent := match["exponent"]:
        return _bounded(value * _power(Fraction(10), Fraction(int(exponent[:9]))))
    return value


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise _NotNumberError
        return base if base >= 0 or exponent % 2 else -base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if max(bits, 1) * abs(exponent) > MAX_BITS:
        raise TooLargeError
    return base ** int(exponent)


def _factorial(value: Fraction, step: int) -> Fraction:
    """5! = 5 * 4 * 3 * 2 * 1, and 5!! = 5 * 3 * 1."""
    if value.denominator != 1 or value < 0:
        raise _NotNumberError
    if value > MAX_FACTORIAL:
        raise TooLargeError
    return Fraction(math.prod(range(int(value), 0, -step)))


def _binomial(top: Fraction, bottom: Fraction) -> Fraction:
    if top.denominator != 1 or bottom.denominator != 1 or min(top, bottom) < 0:
        raise _NotNumberError
    if top > 10_000:
        raise TooLargeError
    return _bounded(Fraction(math.comb(int(top), int(bottom))))


def _root(value: Fraction, degree: Fraction) -> Fraction:
    """Root of a number where it is rational. Negative numbers have odd roots only."""
    if degree.denominator != 1 or not 1 <= degree <= 100:
        raise _NotNumberError
    if value < 0:
        if degree % 2 == 0:
            raise _NotNumberError
        return -_root(-value, degree)
    top, bottom = _whole_root(value.numerator, int(degree)), _whole_root(value.denominator, int(degree))
    if top is None or bottom is None:
        raise _NotNumberError
    return Fraction(top, bottom)


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 1 or number in (0, 1):
        return number
    low, high = 1, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low if low**degree == number else None


def _of_wholes(function: Callable[..., int]) -> Callable[[list[Fraction]], Fraction]:
    def value(numbers: list[Fraction]) -> Fraction:
        if any(number.denominator != 1 for number in numbers):
            raise _NotNumberError
        return Fraction(function(*map(int, numbers)))

    return value


def _arrangements(numbers: list[Fraction]) -> Fraction:
    number, length = numbers
    return _binomial(number, length) * _factorial(length, 1)


_OF_SEVERAL: Final[dict[str, Callable[[list[Fraction]], Fraction]]] = {
    r"\max": max, r"\min": min, r"\gcd": _of_wholes(math.gcd), r"\lcm": _of_wholes(math.lcm),
    "C": lambda numbers: _binomial(*numbers), "P": _arrangements,
}  # fmt: skip
