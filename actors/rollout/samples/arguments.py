"""Checks of what a generate function passes to its conversation."""

import math
from numbers import Integral, Real
from operator import index
from typing import Any, Final

from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array

SHOWN_IDS: Final = 50  # tokens in an error


def checked_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None
) -> tuple[float | None, float | None, int | None]:
    """Return a user's sampling parameters as Python's numbers, which messages can carry; None stays None.

    Raises:
        ValueError: one is not a number, or is impossible.
    """
    temperature, top_p = _number("temperature", temperature), _number("top_p", top_p)
    top_k = checked_integer("top_k", top_k)
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature = {temperature!r}: expected a number of at least 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p!r}: expected a number above 0, at most 1")
    if top_k is not None and top_k != -1 and top_k < 1:
        raise ValueError(f"top_k = {top_k!r}: expected -1 (off), or at least 1")
    return temperature, top_p, top_k


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's are Real
        raise ValueError(f"{name} = {value!r:.100}: expected a number")
    return float(value)


def checked_integer(name: str, value: Any) -> int | None:
    """Return a user's integer as Python's; None stays None.

    Raises:
        ValueError: it is not an integer.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} = {value!r:.100}: expected an integer")
    return index(value)


def shown_ids(ids: Int32Array) -> str:
    """Return the first tokens for an error."""
    return f"{ids[:SHOWN_IDS].tolist()}{'...' if len(ids) > SHOWN_IDS else ''}"


def checked_text(text: Any, call: str) -> str:
    """Return a user's text.

    Raises:
        TypeError: it is not a str.
        ValueError: no message can carry it.
    """
    if not isinstance(text, str):
        raise TypeError(f"{call}({text!r:.200}): expected a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{call}: not text in UTF-8: {error}") from error
    return text


def checked_ids(model: ServedModel, ids: Any) -> list[int]:
    """Return a user's tokens.

    Raises:
        TypeError: one is not an integer.
        ValueError: one is outside of the vocabulary.
    """
    given = [index(token) for token in ids]
    model.check_ids(given)
    return given
