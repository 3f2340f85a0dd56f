"""docs/own-recipe.md: its files, written as they stand there, are accepted and train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-recipe.md"
LIMIT_S = 300


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = {"rows.jsonl": "json", "grading.py": "python", "mine.toml": "toml"}
    for name, language in files.items():
        (text,) = snippets(PAGE, language)
        (folder / name).write_text(text.replace("PHYSARUM", str(ROOT)))
    command = [sys.executable, str(ROOT / "bin" / "start_topology.py"), "mine.toml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_files_of_the_page_are_accepted(tmp_path: Path) -> None:
    done = start(tmp_path, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_run_of_the_page_trains_three_steps(tmp_path: Path) -> None:
    done = start(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["groups"]["trained"]) == (3, 12)
