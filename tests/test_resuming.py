"""--resume: what has passed at a commit is left out the next time, and nothing else."""

from pathlib import Path

from tests.fixtures.resuming import Passed


class Report:
    """Of a test that was called."""

    when = "call"

    def __init__(self, nodeid: str, *, passed: bool) -> None:
        self.nodeid, self.passed = nodeid, passed


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
