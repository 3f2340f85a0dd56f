"""A family is its declaration: in a copy of the tree without the file, all other tests of models pass."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layers import ROOT

TESTS = ("tests/runtime/models", "tests/actors/trainer/models", "tests/actors/tiny_engine/test_tiny_numerics.py")
PAGE = "docs/reference/model-keys.md"


def copied(directory: Path) -> Path:
    """Copy what git has of the tree, and what it would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, directory / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return directory


def rows(directory: Path) -> list[str]:
    """The rows of the table of families."""
    return [line for line in (directory / PAGE).read_text().splitlines() if "ForCausalLM` |" in line]


def run(directory: Path, *command: str) -> None:
    found = subprocess.run([sys.executable, *command], cwd=directory, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["exaone4", "gemma3_text"])
def test_without_its_file_the_table_is_a_row_shorter_and_the_other_tests_pass(kind: str, tmp_path: Path) -> None:
    directory = copied(tmp_path / "tree")
    (directory / "runtime" / "models" / "families" / f"{kind}.py").unlink()
    run(directory, "-P", "bin/physarum.py", "describe-models")
    before, after = rows(ROOT), rows(directory)
    assert [row for row in before if row not in after] == [row for row in before if f"`{kind}`" in row]
    assert len(after) == len(before) - 1
    run(directory, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", *TESTS)
