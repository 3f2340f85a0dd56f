"""Finds a user-defined generate function. Imports little, so that recipe checks can use it."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.settings.plugins import PluginError, load_plugin
from runtime.settings.slime.functions import PREFIX

KEY = "rollout.custom_generate"


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


def is_deterministic(function: Any) -> bool:
    """Return whether a user marked the function: `function.deterministic = True`."""
    return bool(getattr(function, "deterministic", False))
