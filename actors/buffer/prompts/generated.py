"""Generated prompts: a user's function returns one row per number, in place of a data file.

It runs in a process of its own, which can be killed.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from actors.buffer.prompts.prompts import LoadedData, Reader, fingerprint_of, first_ids_of
from actors.buffer.prompts.source_worker import Drawn
from messages import Prompt, PromptsLoaded
from runtime.data.data_files import DataError, Record
from runtime.data.rows import row_of
from runtime.settings.tables.prompts import DataConfig

NUM_PROBED: Final = 8  # prompts generated at the start; they define the run's fingerprint


class Rows(Protocol):
    """The process of the function."""

    def draw(self, first: int, count: int) -> Drawn:
        """Return rows. Raises DataError: the function raises, hangs, or returns no row."""
        ...

    def kill(self) -> None:
        """End the process."""
        ...


class GeneratedPrompts:
    """Generated training prompts by number, without end, and the evaluation sets.

    A number always means the same prompt. The function is called again for a reissued prompt, and after a restart.
    """

    def __init__(self, source: Rows, data: DataConfig, reader: Reader, evals: Sequence[LoadedData] = ()) -> None:
        """Generate the first prompts, twice.

        Raises:
            DataError: a prompt cannot be used, or differs the second time.
        """
        began = time.monotonic()
        self._source = source
        self._data = data
        self._reader = reader
        first, again = (list(self._prompts(0, NUM_PROBED)) for _ in range(2))
        self.first: Sequence[Prompt] = first
        if fingerprint_of(first) != fingerprint_of(again):
            message = "returned another row for the same number on a second call; restarts need the same row"
            raise DataError(f"{data.source}: {message}")
        took_s, of_first = time.monotonic() - began, fingerprint_of(first)
        event = PromptsLoaded(
            data=data.name,
            num_prompts=0,
            num_too_long=0,
            took_s=took_s,
            fingerprint=of_first,
            first_ids=first_ids_of(first),
        )
        self.evals: Mapping[str, tuple[Prompt, ...]] = {item.name: item.prompts for item in evals}
        self.loaded = (event, *(item.event for item in evals))

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number. Calls the user's function.

        Raises:
            DataError: the function raises, or returns a row that cannot be used.
        """
        (prompt,) = self._prompts(number, 1)
        return prompt

    def _prompts(self, first: int, count: int) -> Iterable[Prompt]:
        for number, row in enumerate(self._source.draw(first, count).rows, first):
            place = f"{self._data.source}({number})"
            columns = msgspec.json.decode(row, type=dict[str, Any])
            record = Record(number=number, place=place, columns=columns)
            (prompt,) = self._reader.read([row_of(record, self._data)], self._data)
            if (problem := self._reader.too_long(prompt)) is not None:
                raise DataError(f"{place}: {problem}")
            yield prompt

    def close(self) -> None:
        """End the process of the function."""
        self._source.kill()
