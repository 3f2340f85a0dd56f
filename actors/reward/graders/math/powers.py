r"""Equality of quotients of polynomials whose powers are too large to expand: x^{2020}+1 and 1+x^{2020}.

Both are computed at one point modulo a prime. Two that differ agree there by chance less than once in 10^60.
"""

import hashlib
import re
from typing import Final

from actors.reward.graders.math.arithmetic import TooLargeError, exact_value

PRIME: Final = 2**255 - 19  # of the form 4k + 1, so -1 has a root
MAX_TOKENS: Final = 1_000
MAX_DEPTH: Final = 50
MAX_EXPONENT: Final = 10**9

_GREEK: Final = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega"
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<command>\\(?:frac|cdot)(?![A-Za-z]))"
    rf"|(?P<letter>(?:[A-Za-z]|\\(?:{_GREEK})(?![A-Za-z]))(?:_(?:\{{\w+\}}|\w))?)(?!['_\w]*\()"
    r"|(?P<factor>[A-Za-eijk-oq-z](?=\())|(?P<sign>[-+*/^(){}]))"
)


class _OtherError(Exception):
    """A text is not a quotient of polynomials."""


def equal_powers(ours: str, theirs: str) -> bool:
    """Whether two texts in the form of `latex.normal` are one quotient of polynomials, of any degree up to 10^9.

    False if either is anything else, such as a text without a letter.
    """
    try:
        return _value(ours) == _value(theirs)
    except (_OtherError, TooLargeError):
        return False


def _value(text: str) -> int:
    reader = _Reader(text)
    value = reader.sum()
    if not reader.at_end() or not reader.has_letters:
        raise _OtherError
    return value


class _Reader:
    """A recursive-descent reader of sums, products, quotients and whole powers, modulo the prime."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0
        self.has_letters = any(token[0].isalpha() or token[1:2].isalpha() for token in self._tokens)

    def at_end(self) -> bool:
        return self._next == len(self._tokens)

    def sum(self) -> int:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _OtherError
        value = self._product()
        while self._peek() in ("+", "-"):
            sign = self._pop()
            value += self._product() if sign == "+" else -self._product()
        self._depth -= 1
        return value % PRIME

    def _product(self) -> int:
        value = self._signed()
        while not self.at_end() and self._peek() not in ("+", "-", ")", "}"):
            if self._peek() in ("*", r"\cdot"):
                self._pop()
                value *= self._signed()
            elif self._peek() == "/":
                self._pop()
                value *= _inverse(self._signed())
            elif self._peek()[0].isdigit() or (self._peek() == r"\frac" and self._after_number()):
                raise _OtherError  # x2, 1 2, or a mixed number
            else:
                value *= self._power()
            value %= PRIME
        return value

    def _signed(self) -> int:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._pop() == "-" else sign
        return sign * self._power()

    def _power(self) -> int:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._pop()
        exponent = exact_value(self._exponent())
        if self._peek() == "^" or exponent is None or exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise _OtherError
        return pow(base if exponent >= 0 else _inverse(base), abs(int(exponent)), PRIME)

    def _exponent(self) -> str:
        """The text of a group or of a number behind ^."""
        start = self._next
        if self._peek() in ("+", "-"):
            self._pop()
        depth = 0
        while True:
            token = self._pop()
            depth += (token in "({") - (token in ")}")
            if depth == 0:
                return " ".join(self._tokens[start : self._next])

    def _atom(self) -> int:
        token = self._pop()
        if token in ("(", "{"):
            value = self.sum()
            if self._pop() != {"(": ")", "{": "}"}[token]:
                raise _OtherError
            return value
        if token == r"\frac":
            if self._peek() != "{":
                raise _OtherError
            return self._atom() * _inverse(self._atom()) % PRIME
        if token[0].isdigit():
            whole, _, part = token.partition(".")
            return int(whole + part) * _inverse(pow(10, len(part), PRIME))
        if token == "i":
            return pow(2, (PRIME - 1) // 4, PRIME)  # its square is -1
        if token[0].isalpha() or token[1:2].isalpha():
            return int.from_bytes(hashlib.sha512(token.translate(_BRACES).encode()).digest()) % PRIME
        raise _OtherError

    def _after_number(self) -> bool:
        return self._tokens[self._next - 1][0].isdigit()

    def _peek(self) -> str:
        return "" if self.at_end() else self._tokens[self._next]

    def _pop(self) -> str:
        if self.at_end():
            raise _OtherError
        self._next += 1
        return self._tokens[self._next - 1]


_BRACES: Final = str.maketrans("", "", "{}")


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(found) > MAX_TOKENS or len(match[0]) > MAX_TOKENS:
            raise _OtherError
        found.append(match[0].strip())
        position = match.end()
    return found


def _inverse(value: int) -> int:
    if value % PRIME == 0:
        raise _OtherError
    return pow(value, -1, PRIME)
