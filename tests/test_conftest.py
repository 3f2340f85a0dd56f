"""The guard against left-over processes, tried on tests that leave some; marks stand where bin/test looks for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import subprocess, sys

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
ORPHAN = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"

def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_leaves_child():
    global kept
    kept = subprocess.Popen(SLEEP)

def test_leaves_orphan():
    subprocess.run([sys.executable, "-c", ORPHAN], check=True)
"""


@pytest.mark.slow
def test_left_child_fails_its_test_and_left_orphan_the_session(tmp_path: Path) -> None:
    path = tmp_path / "test_leaky.py"
    path.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(path)]
    environment = os.environ | {"PHYSARUM_TEST_END_S": "0.2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert "3 passed, 2 errors" in done.stdout
    assert "ERROR at teardown of test_leaves_child" in done.stdout
    assert "processes left behind: [" in done.stdout
    assert "ERROR at teardown of test_leaves_orphan" in done.stdout
    assert "processes left behind by this test session: [" in done.stdout


def test_the_mark_slow_stands_in_files_of_tests_alone() -> None:
    """The stage of slow tests collects the files that name it, and no others."""
    command = (ROOT / "bin" / "test").read_text()
    assert "grep -rl --include='test_*.py' 'mark\\.slow' tests" in command
    files = [path for path in (ROOT / "tests").rglob("*.py") if "mark.slow" in path.read_text()]
    assert [path.name for path in files if not path.name.startswith("test_")] == []
    assert Path(__file__) in files
