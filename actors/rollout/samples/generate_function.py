"""Finds and calls users' generate functions. Imports little, so that recipe checks can use it."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from messages.plain import clipped
from runtime.settings.plugins import PluginError, load_plugin
from runtime.settings.slime.functions import PREFIX

KEY = "rollout.custom_generate"
SHOWN_CHARS = 200  # of a returned value, in an error


class KeyedFunction(NamedTuple):
    """A generate function, and the setting that errors of it name."""

    key: str
    function: Callable[[Any], Awaitable[None]]


class WrongCall(ValueError):
    """A user's function is not async, or returned something that does not count."""


def find_generate_function(
    name: str, base_dirs: Sequence[Path] = (), *, key: str = KEY
) -> Callable[[Any], Awaitable[None]]:
    """Find a user-defined generate function, or one of slime.

    Raises:
        PluginError: it does not exist, is not async, or does not take a conversation.
    """
    plugin = load_plugin(key, name, parameters=("conversation",), base_dirs=base_dirs, allow_async=True)
    if not plugin.is_async:
        raise PluginError(key, name, "a plain function cannot wait for the model: write `async def`")
    if name.startswith(PREFIX):
        from actors.rollout.samples.slime_generate import conversing  # heavier than what finds other functions

        return conversing(plugin.function)
    return plugin.function


def find_keyed_function(key: str, name: str, base_dirs: Sequence[Path] = ()) -> KeyedFunction:
    """Find the generate function that a setting names.

    Raises:
        PluginError: as for find_generate_function.
    """
    return KeyedFunction(key, find_generate_function(name, base_dirs, key=key))


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
