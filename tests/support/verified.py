"""The dated rows of docs/results/verified.md, which the commands that verify write beside their pages of results.

python -m tests.support.verified        # adds new test files that CI leaves out, and removes those that are gone
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "docs" / "results"
BEGIN, END = "<!-- written by the commands that verify: tests/support/verified.py -->\n", "<!-- end of the rows -->\n"
HEAD: Final = "| verified by | runs in | last run | commit | result |\n|---|---|---|---|---|\n"
NOT_IN_CI: Final = ("nightly", "nodes", "observe", "gpu")  # marks whose tests, or most of them, other commands run
NAMED: Final = re.compile(r"\bmark\.(\w+)")
UNKNOWN: Final = "–"


class Row(NamedTuple):
    """What ran, and how it ended."""

    what: str  # a test file, with SGLang's stack behind it if that is not the locked one; or a command
    where: str  # marks of the tests, or the machine of the command
    date: str = UNKNOWN
    commit: str = UNKNOWN
    result: str = UNKNOWN  # such as "12 passed"

    @property
    def line(self) -> str:
        """A line of the table."""
        return f"| `{self.what}` | {' | '.join(self[1:])} |\n"


def commit() -> str:
    """Describe the checked-out commit, with "-dirty" if files were changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def ran(what: str, where: str, result: str) -> Row:
    """A row of what has just run."""
    name, *dirty = commit().partition("-dirty")
    return Row(what, where, datetime.now(UTC).date().isoformat(), name[:12] + "".join(dirty), result)


def page_beside(results: Path) -> Path:
    """The page in a folder of pages of results."""
    return results.resolve() / "verified.md"


def note(rows: Iterable[Row], results: Path) -> None:
    """Write rows into the page, in place of older ones of the same name. Without a page nothing is noted."""
    page = page_beside(results)
    if page.exists():
        text = page.read_text(encoding="utf-8")
        page.write_text(with_rows(text, [*rows_of(text), *rows]), encoding="utf-8")


def rows_of(text: str) -> list[Row]:
    """The rows of a page."""
    table = text.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD)
    cells = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines())
    return [Row(what.strip("`"), *rest) for what, *rest in cells]


def with_rows(text: str, rows: Iterable[Row]) -> str:
    """The page with these rows: the last one of each name, commands first."""
    newest = {row.what: row for row in rows}
    lines = [row.line for row in sorted(newest.values(), key=lambda row: (row.what.startswith("tests/"), row.what))]
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + HEAD + "".join(lines) + END + rest.partition(END)[2]


def marked() -> Iterator[Row]:
    """Test files with tests that CI does not run, as rows without a run."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        marks = set(NAMED.findall(file.read_text(encoding="utf-8"))).intersection(NOT_IN_CI)
        if marks:
            yield Row(os.path.relpath(file, ROOT), ", ".join(mark for mark in NOT_IN_CI if mark in marks))


def current(text: str) -> str:
    """The page with a row for each marked file and command."""
    known, files = rows_of(text), {row.what: row for row in marked()}
    commands = [row for row in known if not row.what.startswith("tests/")]
    return with_rows(
        text, [*commands, *files.values(), *(row for row in known if row.what.partition(" (")[0] in files)]
    )


if __name__ == "__main__":
    page_beside(RESULTS).write_text(current(page_beside(RESULTS).read_text(encoding="utf-8")), encoding="utf-8")
