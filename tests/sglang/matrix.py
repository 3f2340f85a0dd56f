"""What was shown on which engine: filled by the tests of the contract, printed at their end."""

import datetime
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tests.sglang.server import EMBEDDED, TP1, TWO_PROCESSES, Server

COLUMNS: Final = (EMBEDDED, TP1, TWO_PROCESSES)
UNRUN: Final = "–"


class Cell(NamedTuple):
    """How a behaviour was found on one engine."""

    outcome: str  # passed, failed or skipped
    version: str

    def __str__(self) -> str:
        return {"passed": "yes"}.get(self.outcome, self.outcome.upper())


class Matrix:
    """Behaviours by engines."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Cell]] = {}
        self._versions: dict[str, str] = {}

    def note(self, behaviour: str, layout: str, outcome: str, server: Server | None) -> None:
        """Take the outcome of a test; of several tests of a behaviour the worst counts."""
        if layout not in self._versions and server is not None and server.alive and outcome == "passed":
            self._versions[layout] = server.version()
        row = self._rows.setdefault(behaviour, {})
        if layout not in row or row[layout].outcome == "passed":
            row[layout] = Cell(outcome, "")

    def report(self, write: Callable[[str], None]) -> None:
        """Write it as a table of Markdown, if any test of the contract ran."""
        if not self._rows:
            return
        write("")
        for line in self.lines():
            write(line)

    def lines(self) -> Iterable[str]:
        """A line a behaviour, a column an engine; its version, and the day, above."""
        heads = [f"{name} ({self._versions.get(name, 'not run')})" for name in COLUMNS]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        yield f"| behaviour, {today} | {' | '.join(heads)} |"
        yield "|---|" + "---|" * len(COLUMNS)
        for behaviour, row in sorted(self._rows.items()):
            yield f"| {behaviour} | {' | '.join(str(row.get(name, UNRUN)) for name in COLUMNS)} |"
