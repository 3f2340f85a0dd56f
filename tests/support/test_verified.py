"""Rows of what was verified are written by commands, each once, and the page has all test files that CI leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.verified import rows_of_files
from tests.support import verified
from tests.support.verified import BEGIN, END, RESULTS, ROOT, Row, current, note, page_beside, rows_of, with_rows


def test_the_page_has_each_test_file_that_ci_leaves_out() -> None:
    text = page_beside(RESULTS).read_text(encoding="utf-8")
    assert current(text) == text, "run: python -m tests.support.verified"
    assert {row.what for row in rows_of(text)} > {"tests/chaos/test_ranks.py", "python -m tests.gpu"}


def test_a_row_replaces_the_older_one_of_its_name(tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    page = tmp_path / "docs" / "results" / "verified.md"
    note([Row("tests/a.py", "nightly")], results)  # there is no page, so nothing is noted
    page.parent.mkdir(parents=True)
    page.write_text(f"# Verified\n\n{BEGIN}{END}\nEnd.\n")
    for date in ("2026-01-01", "2026-01-02"):
        note([Row("tests/a.py", "nightly", date, "c", "1 passed"), Row("python -m b", "by hand", date)], results)
    text = page.read_text()
    assert text.startswith("# Verified\n\n")
    assert text.endswith(f"{END}\nEnd.\n")
    assert rows_of(text) == [
        Row("python -m b", "by hand", "2026-01-02"),
        Row("tests/a.py", "nightly", "2026-01-02", "c", "1 passed"),
    ]
    assert with_rows(text, rows_of(text)) == text


def test_a_file_is_noted_with_what_passed_and_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "commit", lambda: "0123456789abcdef-dirty")
    marks = {"tests/a.py": {"nightly", "chaos"}, "tests/b.py": {"nodes"}, "tests/c.py": {"nodes"}}
    passed, failed = {"tests/a.py::one", "tests/a.py::two", "tests/b.py::one", "tests/d.py::one"}, {"tests/a.py::two"}
    rows = rows_of_files(passed, failed, marks)
    assert [(row.what, row.where, row.commit, row.result) for row in rows] == [
        ("tests/a.py", "nightly, chaos", "0123456789ab-dirty", "1 passed, 1 failed"),
        ("tests/b.py", "nodes", "0123456789ab-dirty", "1 passed"),
    ]


TESTS = """
import pytest

@pytest.mark.grid
def test_one(): pass

@pytest.mark.chaos
def test_two(): assert False

def test_three(): pass
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_session_notes_its_tests_also_if_others_run_them(tmp_path: Path, workers: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  grid\n  chaos\n")
    (tmp_path / "test_a.py").write_text(TESTS)
    page = tmp_path / "verified.md"
    page.write_text(BEGIN + END)
    plugins = ["no:cacheprovider", "xdist", "tests.fixtures.resuming", "tests.fixtures.verified"]
    options = ["-n", workers, "--results", tmp_path, "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini"]
    command = [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins), *options, tmp_path]
    only_these = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=only_these, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [(row.what, row.where, row.result) for row in rows_of(page.read_text())] == [
        ("test_a.py", "grid, chaos", "2 passed, 1 failed")
    ]
