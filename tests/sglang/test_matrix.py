"""The matrix of behaviours: the worst outcome counts, and its page has the day."""

from pathlib import Path

from tests.sglang.matrix import COLUMNS, Matrix
from tests.sglang.stack import stack, versions


def test_the_matrix_is_printed_and_written(tmp_path: Path) -> None:
    matrix, printed = Matrix(), list[str]()
    for behaviour, outcome in (("a stop id", "passed"), ("an abort", "passed"), ("an abort", "failed")):
        matrix.note(behaviour, COLUMNS[0], outcome, "1.2")
    matrix.report(printed.append, tmp_path / "results")
    [page] = (tmp_path / "results").iterdir()
    assert page.name.endswith(f"-{stack().environment}.md")
    assert versions() in page.read_text()
    assert [line.split(" | ")[:2] for line in printed[3:]] == [["| a stop id", "yes"], ["| an abort", "FAILED"]]
    assert "\n".join(printed[1:]) in page.read_text()


def test_without_tests_there_is_no_matrix(tmp_path: Path) -> None:
    Matrix().report(lambda line: None, tmp_path / "results")
    assert not (tmp_path / "results").exists()
