"""Numbers of this project that may rise only with a reason: the last decision in docs/decisions/README.md has them.

    python -m tests.support.ratchet   # lowers the numbers of the page to those of the code, and prints what is higher

A higher number needs a row of its own below those of its measure, with the reason in one sentence.
"""

import ast
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.journeys import JOURNEYS, Counts, count

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "decisions" / "README.md"
FOLDERS: Final = ("actors", "bin", "messages", "runtime")
TABLES: Final = "runtime/settings/tables"
ROW: Final = re.compile(r"^\| ([a-z' ]+?) \| (\d+) \| (\d{4}-\d\d-\d\d) \| (.*?) \|$", re.MULTILINE)
DECLARES: Final = re.compile(r"\bFunction\[|Annotated\[.*, [A-Z_]+\]")  # a field that names a user's function
PLAIN_WORDS: Final = {"function", "graders", "parser", "source"}  # fields whose names say other things elsewhere


class Row(NamedTuple):
    """A number of the page, since when, and why it rose to it."""

    measure: str
    number: int
    since: str
    reason: str


def function_keys() -> set[str]:
    """Names of the settings that name a user's function."""
    fields = (
        (node.target.id, ast.unparse(node.annotation))
        for path in sorted((ROOT / TABLES).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )
    return {name for name, annotation in fields if DECLARES.search(annotation)} - PLAIN_WORDS


def places_in(text: str, keys: set[str]) -> set[str]:
    """Settings of users' functions that a module names: as an attribute, an argument, or the end of a dotted key."""
    keys = {key for key in keys if key in text}  # most modules name none, and need no parsing
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)) if keys else ():
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.rpartition(".")[2])
    return found & keys


def function_places() -> int:
    """Count the modules that name a setting of a user's function, once for each, without the tables of settings."""
    keys = function_keys()
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    outside = (path for path in paths if TABLES not in path.as_posix())
    return sum(len(places_in(path.read_text(), keys)) for path in outside)


def _size(journey: str, part: str) -> int:
    counts: Counts = count(JOURNEYS[journey])
    return len(getattr(counts, part))


MEASURES: Final[dict[str, Callable[[], int]]] = {
    **{
        f"{part} of {journey}": partial(_size, journey, part)
        for journey in JOURNEYS
        for part in ("files", "forms", "messages", "threads")
    },
    "places of users' functions": function_places,
}


def rows_of(page: str) -> list[Row]:
    """Return the rows of the page's table."""
    return [Row(measure, int(number), since, reason) for measure, number, since, reason in ROW.findall(page)]


def numbers_of(page: str) -> dict[str, int]:
    """Return the number of each measure: that of its last row."""
    return {row.measure: row.number for row in rows_of(page)}


def lowered(page: str, counted: dict[str, int]) -> str:
    """Lower the numbers of the page to those of the code."""
    for row in {row.measure: row for row in rows_of(page)}.values():
        if counted[row.measure] < row.number:
            old = f"| {row.measure} | {row.number} | {row.since} |"
            before, _, after = page.rpartition(old)
            page = f"{before}{old.replace(f' {row.number} ', f' {counted[row.measure]} ')}{after}"
    return page


def unreasoned(before: str, after: str) -> list[str]:
    """Return the measures whose number is higher than in an earlier page, and whose last row is none of its own."""
    old, new = numbers_of(before), numbers_of(after)
    rows = {row.measure: row for row in rows_of(after)}
    reasons = {row.reason for row in rows_of(before)}
    return [name for name, number in new.items() if number > old.get(name, number) and rows[name].reason in reasons]


if __name__ == "__main__":
    now = {measure: counted() for measure, counted in MEASURES.items()}
    PAGE.write_text(lowered(PAGE.read_text(), now))
    page = numbers_of(PAGE.read_text())
    higher = [
        f"{name}: {page[name]} in {PAGE.name}, {number} now" for name, number in now.items() if number > page[name]
    ]
    sys.stdout.write("".join(f"{line}; add a row with the reason\n" for line in higher))
    sys.exit(bool(higher))
