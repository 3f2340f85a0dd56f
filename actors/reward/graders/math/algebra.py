"""Equality of symbolic answers, by the package math-verify (extra `math`)."""

import functools
import importlib
import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from fractions import Fraction
from types import FrameType
from typing import Any, Final

from actors.reward.graders.math.powers import equal_powers

LIMIT_S: Final = 5.0  # CPU time of all comparisons of one answer
AGAIN_S: Final = 0.2  # sympy may catch the first exception
MAX_CHARS: Final = 1_000
SMALL: Final = 1e-15
SAME_PART: Final = 1e-9
MAX_EXPONENT: Final = 64  # of an expression with letters: sympy expands powers

_DECIMAL: Final = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?!\d*\.\d)")
_EXPONENT: Final = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*-?(\d+)")
_TOWER: Final = re.compile(r"(?:\^|\*\*)\s*(?:\{[^{}]*(?:\^|\*\*)|[({]*\s*\d+\s*[)}]*\s*(?:\^|\*\*))")
_FACTORIAL: Final = re.compile(
    r"(\d+)\s*!|[A-Za-z]\s*!|\((?=[^()]*[A-Za-z])[A-Za-z\d+ -]{1,20}\)\s*!|(?P<other>[)\]}!]\s*!)"
)
_DEGREES: Final = re.compile(
    r"(?P<angle>\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}|\\?[a-z]+|\([^()]*\)|\{[^{}]*\}) ?\^ ?\\circ"
)
_TO_COMPUTE: Final = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])")
_INDEX: Final = re.compile(r"\\(?:sum|prod)_\{ ?i ?=")
_LETTER_I: Final = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_WORD: Final = re.compile(r"\\[A-Za-z]+")
_LETTER: Final = re.compile("[A-Za-z]")
MAX_FACTORIAL: Final = 100


class TimeIsUp(BaseException):
    """An answer was not compared in time. No Exception, since sympy and math-verify catch those."""


@contextmanager
def cpu_limit(limit_s: float = LIMIT_S) -> Generator[None]:
    """Raise TimeIsUp after this CPU time, which other processes do not use up. No limit outside of a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def is_safe(text: str) -> bool:
    """Whether an expression is small enough for sympy: no large exponent, tower of exponents or factorial."""
    if len(text) > MAX_CHARS or _TOWER.search(text):
        return False
    if any(len(digits) > 4 or int(digits) > MAX_EXPONENT for digits in _EXPONENT.findall(text)):
        return False
    factorials = [(match[1], match["other"]) for match in _FACTORIAL.finditer(text)]
    return not any(
        other or (digits and (len(digits) > 3 or int(digits) > MAX_FACTORIAL)) for digits, other in factorials
    )


def exact_decimals(text: str) -> str:
    r"""Write decimals as fractions, so that no float is compared: 0.1x becomes \frac{1}{10}x."""

    def fraction(match: re.Match[str]) -> str:
        value = Fraction(int(match[1] + match[2]), 10 ** len(match[2]))
        if value.denominator == 1:
            return str(value.numerator)
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    return _DECIMAL.sub(fraction, text)


def symbolically_equal(response: str, label: str) -> bool:
    """Whether two LaTeX expressions are equal by algebra, in the order of variables, sets and relations.

    Expressions that are too large for sympy are unequal, but for quotients of polynomials: see powers. It has no limit
    of time: see cpu_limit.
    """
    response, label = (_DEGREES.sub(r"(\\frac{\g<angle>\\cdot\\pi}{180})", text) for text in (response, label))
    if not (is_safe(response) and is_safe(label)):
        return equal_powers(response, label)
    ours, theirs = _parsed(response), _parsed(label)
    if not ours or not theirs:
        return False
    library = _math_verify()
    equal = library.verify(
        theirs, ours, float_rounding=30, numeric_precision=50, allow_set_relation_comp=True, timeout_seconds=None
    )
    if not equal or _differ_by_little(ours[0], theirs[0]):
        return False
    # 9h0 and 10h0 are 0 as products
    return not (
        _is_zero(theirs[0]) and _LETTER.search(_WORD.sub("", response)) and _LETTER.search(_WORD.sub("", label))
    )


def _is_zero(expression: Any) -> bool:
    return bool(hasattr(expression, "doit") and expression.doit() == 0)


def _differ_by_little(ours: Any, theirs: Any) -> bool:
    """Whether two small numbers differ, which math-verify takes for equal after 30 decimals."""
    if not (getattr(ours, "is_number", False) and getattr(theirs, "is_number", False)) or ours == theirs:
        return False
    try:
        values = complex(ours), complex(theirs)
    except (TypeError, ValueError, OverflowError):
        return False
    if not 0 < max(map(abs, values)) < SMALL or abs(values[0] - values[1]) <= max(map(abs, values)) * SAME_PART:
        return False
    return not ours.doit().equals(theirs.doit())  # \sin\pi is 0, but for its rounding


def numerical_value(text: str) -> float | None:
    """Value of a real number that is small enough for sympy; None for another text."""
    for expression in _parsed(text) if is_safe(text) else ():
        try:
            return float(expression)
        except (TypeError, ValueError, OverflowError):
            return None
    return None


def _parsed(text: str) -> list[Any]:
    """Expressions of a LaTeX text; empty if it is none."""
    library = _math_verify()
    if _INDEX.search(text):  # beside an i, math-verify takes no letter for a real number
        text = _LETTER_I.sub(r"\\iota ", text)
    boxed = rf"\boxed{{{exact_decimals(text)}}}"
    found: list[Any] = library.parse(boxed, [_extraction()], parsing_timeout=None, fallback_mode="no_fallback")
    expressions = [each for each in found if not isinstance(each, str)]
    if _TO_COMPUTE.search(text):
        expressions = [each.doit() if hasattr(each, "doit") else each for each in expressions]
    return [_with_imaginary_unit(each) for each in expressions] if "i" in text else expressions


def _with_imaginary_unit(expression: Any) -> Any:
    """Take the letter i, which math-verify reads as a variable, for the square root of -1."""
    sympy = importlib.import_module("sympy")
    letters = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    if not letters:
        return expression
    try:
        found = expression.subs(letters)
        return found.expand() if hasattr(found, "expand") else found  # a set has no such method
    except (TypeError, ValueError):  # an order or an interval, in which i is a variable
        return expression


@functools.cache
def _extraction() -> Any:
    """Settings under which math-verify removes no units: it takes the last letter of 2h and \\pi r^2 h for one."""
    normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        units=False, malformed_operators=True, nits=True
    )
    return _math_verify().LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)


@functools.cache
def _math_verify() -> Any:
    """Import math-verify. It imports sympy, which takes a second, and that does not count for cpu_limit."""
    if threading.current_thread() is not threading.main_thread():
        return importlib.import_module("math_verify")
    left_s = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    try:
        return importlib.import_module("math_verify")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *left_s)
