"""docs/reference/parity-rows.md: every row and trap once, in a state that agrees with the tree and its tests."""

import ast
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from actors.reward.graders.builtin import BUILT_IN_GRADERS
from runtime.compat.slime.flags import find_flag
from tests.docs.citations import CITED, ROOT, cited_files, wrong_citations

LINES = (ROOT / "docs" / "reference" / "parity-rows.md").read_text(encoding="utf-8").splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
ROWS = [cells for cells in CELLS if re.fullmatch(r"\d+|\([a-z]\)", cells[0])]
STATES = ("done", "replaced", "narrower", "not yet")


def test_every_row_and_every_trap_is_there_once_and_in_order() -> None:
    assert [row[0] for row in ROWS] == [*map(str, range(1, 198)), *(f"({letter})" for letter in "abcdefghijklmnopq")]


def test_the_counts_at_the_top_are_right() -> None:
    counted = {cells[0].strip("`"): (int(cells[1]), int(cells[2])) for cells in CELLS if cells[0].strip("`") in STATES}
    rows, traps = (Counter(row[1] for row in ROWS if row[0].isdigit() == is_row) for is_row in (True, False))
    assert counted == {state: (rows[state], traps[state]) for state in STATES}
    assert ["", "197", "17", ""] in CELLS


def test_the_page_for_users_has_the_same_counts() -> None:
    said = (ROOT / "docs" / "develop" / "parity.md").read_text(encoding="utf-8")
    counted = Counter(row[1] for row in ROWS if row[0].isdigit())
    done, replaced, narrower, missing = (counted[state] for state in STATES)
    line = f"{done} are done, {replaced} replaced, {narrower} narrower, {missing} not implemented yet"
    assert line in " ".join(said.split())


def test_every_row_says_what_its_state_asks_for() -> None:
    """What is there is shown by a test; what is open names what the tree lacks, or the test of the refusal."""
    forms = dict.fromkeys(STATES, CITED.pattern) | {"not yet": r"(absent|refused): `.*"}
    assert [row for row in ROWS if not (row[1] in forms and re.fullmatch(forms[row[1]], row[2]))] == []


def test_every_test_that_is_cited_exists_and_no_citation_is_overlooked() -> None:
    cited = "\n".join(row[2] for row in ROWS)
    assert wrong_citations(cited) == []
    assert len(CITED.findall(cited)) == sum(row[1] != "not yet" for row in ROWS)


def marks_of(path: str, name: str) -> frozenset[str]:
    """Marks of a cited test function and of its file. Parameters with marks of their own stand beside others."""
    (file,) = cited_files(path, name)
    body = ast.parse(file.read_bytes()).body
    of_file = [
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    (own,) = [node.decorator_list for node in functions if node.name == name]
    return named_marks(node for node in own if "parametrize(" not in ast.unparse(node)) | named_marks(of_file)


def named_marks(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(name for node in nodes for name in re.findall(r"\bmark\.(\w+)", ast.unparse(node)))


def runs_in_ci(marks: frozenset[str]) -> bool:
    return not marks & {"nightly", "gpu", "bench"}


def test_what_is_there_is_shown_by_a_test_of_ci() -> None:
    """A test that only `just nightly` or a GPU runs shows nothing of today's tree."""
    cited = {row[0]: CITED.findall(row[2]) for row in ROWS if row[1] in ("done", "narrower")}
    assert [
        row for row, tests in cited.items() if not any(runs_in_ci(marks_of(path, name)) for path, name in tests)
    ] == []


def test_marks_of_functions_are_seen_and_not_those_of_some_parameters() -> None:
    assert "nightly" in marks_of("test_poison.py", "test_a_request_that_kills_the_server_fails_alone")
    assert "nightly" not in marks_of("nodes/test_runs.py", "test_a_run_on_two_machines_learns_and_its_books_close")
    assert not runs_in_ci(frozenset({"nightly", "timeout"}))


def missing_items() -> list[tuple[str, str]]:
    """Row and item of everything that `not yet` rows call absent."""
    lists = [(row[0], re.search(r"absent: ((?:`[^`]+`(?:, )?)+)", row[2])) for row in ROWS if row[1] == "not yet"]
    return [(row, item) for row, found in lists if found for item in re.findall(r"`([^`]+)`", found[1])]


def is_absent(item: str) -> bool:
    """Whether the tree lacks an item: a flag's key, a grader, an import, a file, or a text of the product."""
    kind, _, name = item.partition(" ")
    if item.startswith("--"):
        found = find_flag(item)
        assert found is not None, f"slime has no {item}"
        return found.answer.key is None
    if item.startswith("rm_type="):
        return item.removeprefix("rm_type=") not in BUILT_IN_GRADERS
    if kind == "file":
        return not list(ROOT.glob(name))
    assert kind in ("import", "text"), item
    wanted = re.compile(rf"^\s*(?:import|from) {name}\b" if kind == "import" else re.escape(name), re.MULTILINE)
    files = (file for package in ("actors", "bin", "messages", "runtime") for file in (ROOT / package).rglob("*"))
    texts = (file.read_text() for file in files if file.is_file() and file.suffix in ("", ".py", ".toml"))
    return not any(wanted.search(text) for text in texts)


@pytest.mark.parametrize(("row", "item"), missing_items())
def test_what_is_called_absent_is_absent(row: str, item: str) -> None:
    assert is_absent(item), f"row {row} says that the tree lacks {item}, which it has"


@pytest.mark.parametrize(
    "item", ["--hf-checkpoint", "rm_type=f1", "import msgspec", "text nats-server", "file README.md"]
)
def test_what_is_there_is_not_absent(item: str) -> None:
    assert not is_absent(item)


def test_a_row_that_is_refused_names_a_test_of_a_refusal() -> None:
    refused = [found for row in ROWS for found in re.findall(r"refused: `(?:[^`]+::)?(\w+)`", row[2])]
    assert {name for name in refused if not re.search("refuse|fails", name)} == set()
