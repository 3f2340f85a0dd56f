"""Prompts that a user's function makes, one for each number, where no data file is used."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.buffer.prompts.prompts import LoadedData, Reader, fingerprint_of
from messages import Prompt, PromptsLoaded
from runtime.samples.data_files import DataError, Record
from runtime.samples.rows import row_of
from runtime.settings.plugins import load_plugin
from runtime.settings.recipe import DataConfig

NUM_PROBED: Final = 8  # the first prompts, which are made at the start; the run's fingerprint is theirs

Make = Callable[[int], dict[str, Any]]


def find_source(key: str, value: str, base_dirs: Sequence[Path] = ()) -> Make:
    """Find the function that a setting names.

    Raises:
        PluginError: there is none, or it cannot be called with a number.
    """
    return load_plugin(key, value, parameters=["number"], base_dirs=base_dirs).function


class MadePrompts:
    """Training prompts by number, and the evaluation sets. A number always means the same prompt, and there is no end.

    The function is called again for a prompt that is issued again, and after a restart.
    """

    def __init__(self, make: Make, data: DataConfig, reader: Reader, evals: Sequence[LoadedData] = ()) -> None:
        """Makes the first prompts.

        Raises:
            DataError: one of them cannot be used, or is another one when it is asked for again.
        """
        began = time.monotonic()
        self._make = make
        self._data = data
        self._reader = reader
        first, again = ([self.prompt(number) for number in range(NUM_PROBED)] for _ in range(2))
        self.first: Sequence[Prompt] = first
        if fingerprint_of(first) != fingerprint_of(again):
            message = (
                "gives other rows when it is asked again; a number must always give the same, as restarts ask again"
            )
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
        """The prompt that was or will be issued as this number. Calls the user's function.

        Raises:
            DataError: it raises, or gives a row that cannot be used.
        """
        place = f"{self._data.source}({number})"
        row = row_of(Record(number=number, place=place, columns=self._columns(number, place)), self._data)
        (prompt,) = self._reader.read([row], self._data)
        if (problem := self._reader.too_long(prompt)) is not None:
            raise DataError(f"{place}: {problem}")
        return prompt

    def _columns(self, number: int, place: str) -> dict[str, Any]:
        try:
            made = self._make(number)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise DataError(f"{place}: raised {type(error).__name__}: {error}") from error
        try:
            return msgspec.json.decode(msgspec.json.encode(made), type=dict[str, Any])
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{place}: expected a dict of what JSON can hold: {error}") from None
