"""Generated prompts: a user's function returns one row per number, in place of a data file."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.buffer.prompts.prompts import LoadedData, Reader, fingerprint_of
from messages import Prompt, PromptsLoaded
from runtime.data.data_files import DataError, Record
from runtime.data.rows import row_of
from runtime.settings.plugins import load_plugin
from runtime.settings.recipe import DataConfig

NUM_PROBED: Final = 8  # prompts generated at the start; they define the run's fingerprint

Make = Callable[[int], dict[str, Any]]


def find_source(key: str, value: str, base_dirs: Sequence[Path] = ()) -> Make:
    """Find the function that a setting names.

    Raises:
        PluginError: it does not exist, or cannot be called with a number.
    """
    return load_plugin(key, value, parameters=["number"], base_dirs=base_dirs).function


class GeneratedPrompts:
    """Generated training prompts by number, without end, and the evaluation sets.

    A number always means the same prompt. The function is called again for a reissued prompt, and after a restart.
    """

    def __init__(self, make: Make, data: DataConfig, reader: Reader, evals: Sequence[LoadedData] = ()) -> None:
        """Generate the first prompts, twice.

        Raises:
            DataError: a prompt cannot be used, or differs the second time.
        """
        began = time.monotonic()
        self._make = make
        self._data = data
        self._reader = reader
        first, again = ([self.prompt(number) for number in range(NUM_PROBED)] for _ in range(2))
        self.first: Sequence[Prompt] = first
        if fingerprint_of(first) != fingerprint_of(again):
            message = "returned another row for the same number on a second call; restarts need the same row"
            raise DataError(f"{data.source}: {message}")
        event = PromptsLoaded(
            data=data.name,
            num_prompts=0,
            num_too_long=0,
            took_s=time.monotonic() - began,
            fingerprint=fingerprint_of(first),
        )
        self.evals: Mapping[str, tuple[Prompt, ...]] = {item.name: item.prompts for item in evals}
        self.loaded = (event, *(item.event for item in evals))

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number. Calls the user's function.

        Raises:
            DataError: the function raises, or returns a row that cannot be used.
        """
        place = f"{self._data.source}({number})"
        row = row_of(Record(number=number, place=place, columns=self._columns(number, place)), self._data)
        (prompt,) = self._reader.read([row], self._data)
        if (problem := self._reader.too_long(prompt)) is not None:
            raise DataError(f"{place}: {problem}")
        return prompt

    def _columns(self, number: int, place: str) -> dict[str, Any]:
        try:
            row = self._make(number)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise DataError(f"{place}: raised {type(error).__name__}: {error}") from error
        try:
            return msgspec.json.decode(msgspec.json.encode(row), type=dict[str, Any])
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{place}: expected a dict of JSON values: {error}") from None
