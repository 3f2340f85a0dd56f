"""Calls users' async functions."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from messages.plain import clipped
from runtime.functions.load import load
from runtime.functions.table import GENERATE

KEY = "rollout.custom_generate"
MAX_STARTS = 3  # of a generate function from the prompt, for one sample of a delivery
SHOWN_CHARS = 200  # of a returned value, in an error


class KeyedFunction(NamedTuple):
    """A generate function, and the setting that errors of it name."""

    key: str
    function: Callable[[Any], Awaitable[None]]
    max_starts: int = MAX_STARTS  # runs from the prompt, for one sample of a delivery
    own_s: float | None = None  # seconds of its own over all turns; None: between two turns, by the setting

    @classmethod
    def of(cls, key: str, name: str) -> "KeyedFunction":
        """Load the generate function that a setting names. Raises PluginError: it cannot be used."""
        return cls(key, load(GENERATE, key, name).function)


class WrongCall(ValueError):
    """A user's function is not async, or returned something that does not count."""


async def call_async(function: Any, argument: object, *, counts: str) -> None:
    """Call a user's function that returns nothing.

    Args:
        function: of the user.
        argument: its only one.
        counts: what counts instead of a returned value, for the error.

    Raises:
        WrongCall: it is no function, a plain one, or returned something.
    """
    if not callable(function):
        raise WrongCall(f"{_shown(function)} is not a function: pass an async function itself, not its name")
    awaited = function(argument)
    if not inspect.isawaitable(awaited):
        raise WrongCall(
            f"{_name_of(function)} is not async and returned {_shown(awaited)}: write `async def`, without yield"
        )
    returned: object = await awaited
    if returned is not None:
        raise WrongCall(f"{_name_of(function)} returned {_shown(returned)}; expected nothing: {counts}")


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _shown(value: object) -> str:
    try:
        return clipped(repr(value), SHOWN_CHARS)
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"an object of {type(value).__name__}"


def is_deterministic(function: Any) -> bool:
    """Return whether a user marked the function: `function.deterministic = True`."""
    return bool(getattr(function, "deterministic", False))
