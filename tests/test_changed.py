"""`just ready` finds the tests of what was changed."""

import subprocess
from pathlib import Path

import pytest

from tests.support.changed import changed_files, found_tests


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "actors/filter/filters.py": "",
        "actors/filter/lengths.py": "",
        "tests/actors/filter/test_filters.py": "",
        "tests/actors/filter/test_filters_by_hand.py": "",
        "tests/actors/filter/test_actor.py": "from actors.filter.lengths import longest\n",
        "tests/test_wording.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("actors/filter/filters.py",
         ["tests/actors/filter/test_filters.py", "tests/actors/filter/test_filters_by_hand.py"]),
        ("actors/filter/lengths.py", ["tests/actors/filter/test_actor.py"]),
        ("tests/actors/filter/test_actor.py", ["tests/actors/filter/test_actor.py"]),
        ("tests/actors/filter/test_deleted.py", []),
        ("tests/support/changed.py", []),
        ("docs/README.md", ["tests/test_wording.py"]),
        ("justfile", []),
    ],
)  # fmt: skip
def test_a_changed_file_has_its_tests(file: str, expected: list[str], tree: Path) -> None:
    assert found_tests([file], tree) == expected


def test_committed_and_open_changes_are_found(tree: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(("git", *who, *words), cwd=tree, check=True, capture_output=True, timeout=200)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "one")
    git("checkout", "-b", "mine")
    (tree / "actors/filter/filters.py").write_text("x = 1\n")
    git("commit", "-am", "two")
    (tree / "actors/filter/lengths.py").write_text("x = 1\n")
    (tree / "new.py").write_text("")
    assert changed_files("main", tree) == ["actors/filter/filters.py", "actors/filter/lengths.py", "new.py"]
