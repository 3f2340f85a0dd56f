"""A run that waits for its test: it trains no step before the test has read of the one before it.

So what a test does after so many steps comes within the run, on every machine. The test writes the number of steps
into the size of a file. `moments/sitecustomize.py` makes the trainer wait for it before each step.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from tests.chaos.rank_moments import with_moments

VARIABLE: Final = "PHYSARUM_TEST_PACE"
AHEAD: Final = 1  # train steps more than the test has read of
LOOK_S: Final = 0.01  # between two looks of the trainer


class Pace:
    """The test's side. No file, or none yet: the run waits for nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._is_held = False

    def environment(self) -> dict[str, str]:
        """The environment variables of the run."""
        return {} if self._file is None else {VARIABLE: str(self._file), **with_moments()}

    def allow(self, trained: int) -> None:
        """Allow the steps that follow so many trained ones, unless it is held."""
        if self._file is not None and not self._is_held:
            self._file.touch()
            os.truncate(self._file, trained + AHEAD)

    def free(self) -> None:
        """Let the run train to its end."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Generator[None]:
        """Allow no further steps in the block."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before


def install() -> None:
    """Make the trainer wait for its test. A step that is trained again is always allowed."""
    from actors.trainer.data.feed import Feed

    file, fetch = Path(os.environ[VARIABLE]), Feed.batch

    def allowed() -> int:
        try:
            return file.stat().st_size
        except FileNotFoundError:
            return sys.maxsize

    async def batch(feed: Feed, step: int) -> Any:
        while step >= allowed():  # noqa: ASYNC110 - another process writes the file
            await anyio.sleep(LOOK_S)
        return await fetch(feed, step)

    Feed.batch = batch  # type: ignore[method-assign]
