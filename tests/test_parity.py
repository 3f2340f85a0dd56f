"""docs/develop/parity-rows.md: every row and trap once, in a state that there is, shown by tests that exist."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES = (ROOT / "docs" / "develop" / "parity-rows.md").read_text(encoding="utf-8").splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
ROWS = [cells for cells in CELLS if re.fullmatch(r"\d+|\([a-z]\)", cells[0])]
STATES = ("done", "replaced", "narrower", "not yet")
CITED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CITATIONS = sorted({found for row in ROWS for found in CITED.findall(row[3])})


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions of a file; none where there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = (node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, functions))
    return frozenset(name for name in names if name.startswith("test_"))


def test_every_row_and_every_trap_is_there_once_and_in_order() -> None:
    assert [row[0] for row in ROWS] == [*map(str, range(1, 198)), *(f"({letter})" for letter in "abcdefghijklmnopq")]


def test_the_counts_at_the_top_are_right() -> None:
    counted = {cells[0].strip("`"): (int(cells[1]), int(cells[2])) for cells in CELLS if cells[0].strip("`") in STATES}
    rows, traps = (Counter(row[2] for row in ROWS if row[0].isdigit() == is_row) for is_row in (True, False))
    assert counted == {state: (rows[state], traps[state]) for state in STATES}
    assert ["", "197", "17", ""] in CELLS


def test_every_row_says_what_its_state_asks_for() -> None:
    """Done is shown by a test, a replacement says what and why, a narrower one what is lost; what is open says so."""
    forms = {
        "done": "`tests/",
        "replaced": r"(?!`tests/).",
        "narrower": r"(?!`tests/).*Lost: .*`tests/",
        "not yet": r"later($|[:;])",
    }
    wrong = [row for row in ROWS if not (row[1] and row[2] in forms and re.match(forms[row[2]], row[3]))]
    assert wrong == []


def test_every_test_that_is_cited_exists() -> None:
    assert [f"{path}::{name}" for path, name in CITATIONS if name not in functions_of(path)] == []


def test_no_citation_is_overlooked() -> None:
    mentioned = sum(row[3].count(".py::") for row in ROWS)
    assert mentioned == sum(len(CITED.findall(row[3])) for row in ROWS) > 150
