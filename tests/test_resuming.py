"""--resume: what has passed at a commit is left out the next time, and nothing else; --results tells of all of it."""

from pathlib import Path

from tests.fixtures.resuming import Passed


class Report:
    """Of a test that was called."""

    when = "call"
    duration = 2.0

    def __init__(self, nodeid: str, *, passed: bool) -> None:
        self.nodeid, self.passed, self.failed = nodeid, passed, not passed


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


class Config:
    """Takes what was left out."""

    def __init__(self) -> None:
        self.hook, self.left_out = self, []

    def pytest_deselected(self, items: list[Item]) -> None:
        self.left_out = [item.nodeid for item in items]


def left(passed: Passed) -> list[str]:
    items = [Item(name) for name in ("a", "b", "c")]
    passed.pytest_collection_modifyitems(Config(), items)  # type: ignore[arg-type]
    return [item.nodeid for item in items]


def test_what_has_passed_at_this_commit_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "passed"
    first = Passed(file, "1")
    assert left(first) == ["a", "b", "c"]
    for name, passed in (("a", True), ("b", False)):
        first.pytest_runtest_logreport(Report(name, passed=passed))  # type: ignore[arg-type]
    assert left(Passed(file, "1")) == ["b", "c"]
    assert left(Passed(file, "2")) == ["a", "b", "c"]
    assert left(Passed(file, "1")) == ["a", "b", "c"]


def test_a_page_tells_of_what_passed_in_earlier_sessions_too(tmp_path: Path) -> None:
    file, results = tmp_path / ".nodes-passed", tmp_path / "results"
    Passed(file, "1").pytest_runtest_logreport(Report("tests/a.py::one", passed=True))  # type: ignore[arg-type]
    second = Passed(file, "1", results)
    for name, passed in (("tests/a.py::two", False), ("tests/b.py::three", True)):
        second.pytest_runtest_logreport(Report(name, passed=passed))  # type: ignore[arg-type]
    second.pytest_sessionfinish()
    (page,) = results.iterdir()
    assert page.name.endswith("-nodes.md")
    told = page.read_text()
    assert told.startswith("# Nodes tests, ")
    assert "Commit 1; " in told
    assert "| tests/a.py | 1 | 1 | 2 |" in told
    assert "| tests/b.py | 1 | 0 | 2 |" in told
    assert told.endswith("Failed: `tests/a.py::two`\n")


def test_half_a_line_of_a_killed_session_counts_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "passed"
    file.write_text("1\na\t2.0\nb\t\nc")
    assert left(Passed(file, "1")) == ["b", "c"]
