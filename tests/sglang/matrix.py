"""Matrix of behaviours by engine: the contract tests fill it, and pytest prints it at the end."""

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from tests.sglang.server import TINY, TP1, TWO_PROCESSES
from tests.sglang.stack import stack, versions

COLUMNS: Final = (TINY, TP1, TWO_PROCESSES)
UNRUN: Final = "–"
PASSED: Final = "passed"


class Matrix:
    """Outcomes by behaviour and engine layout."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, str]] = {}
        self._versions: dict[str, str] = {}

    def note(self, behaviour: str, layout: str, outcome: str, version: str) -> None:
        """Add the outcome of a test. Of several tests of a behaviour the worst outcome counts."""
        if version:
            self._versions.setdefault(layout, version)
        row = self._rows.setdefault(behaviour, {})
        if layout not in row or row[layout] == PASSED:
            row[layout] = outcome

    def report(self, write: Callable[[str], None], results: Path | None = None) -> None:
        """Write the matrix as a Markdown table, if any contract test ran; also a dated page into `results`."""
        if not self._rows:
            return
        write("")
        for line in self.lines():
            write(line)
        if results is not None:
            results.mkdir(parents=True, exist_ok=True)
            today = datetime.datetime.now(datetime.UTC).date()
            text = "\n".join([versions(), "", *self.lines()])
            (results / f"{today}-{stack().environment}.md").write_text(f"# Behaviours of engines, {today}\n\n{text}\n")

    def lines(self) -> Iterable[str]:
        """Yield a line per behaviour, with a column per engine. The heading has the versions and the day."""
        heads = [f"{name} ({self._versions.get(name, 'not run')})" for name in COLUMNS]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        yield f"| behaviour, {today} | {' | '.join(heads)} |"
        yield "|---|" + "---|" * len(COLUMNS)
        for behaviour, row in sorted(self._rows.items()):
            yield f"| {behaviour} | {' | '.join(shown(row.get(name)) for name in COLUMNS)} |"


def shown(outcome: str | None) -> str:
    """Format an outcome for the table. None: the test did not run."""
    if outcome is None:
        return UNRUN
    return "yes" if outcome == PASSED else outcome.upper()
