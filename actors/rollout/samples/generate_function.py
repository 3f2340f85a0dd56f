"""Finds a user-defined generate function. Imports little, so that recipe checks can use it."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.settings.plugins import PluginError, load_plugin

KEY = "rollout.custom_generate"


def find_generate_function(
    name: str, base_dirs: Sequence[Path] = (), *, key: str = KEY
) -> Callable[[Any], Awaitable[None]]:
    """Find a user-defined generate function.

    Raises:
        PluginError: it does not exist, is not async, or does not take a conversation.
    """
    plugin = load_plugin(key, name, parameters=("conversation",), base_dirs=base_dirs, allow_async=True)
    if not plugin.is_async:
        raise PluginError(key, name, "a plain function cannot wait for the model: write `async def`")
    return plugin.function


def is_deterministic(function: Any) -> bool:
    """Return whether a user marked the function: `function.deterministic = True`."""
    return bool(getattr(function, "deterministic", False))
