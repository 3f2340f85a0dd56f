"""docs/start/own-recipe.md: its files, written as they stand there, are accepted and train."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import snippets
from tests.support.whole_runs import best_reward

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "own-recipe.md"
LIMIT_S = 300


def start(folder: Path, *arguments: str, topology: str = "mine.toml") -> subprocess.CompletedProcess[str]:
    files = {"json": ["rows.jsonl"], "python": ["grading.py"], "toml": ["mine.toml", "chat.toml"]}
    for language, names in files.items():
        for name, text in zip(names, snippets(PAGE, language), strict=True):
            (folder / name).write_text(text.replace("PHYSARUM", str(ROOT)))
    command = [sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology", topology, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_files_of_the_page_are_accepted(tmp_path: Path) -> None:
    done = start(tmp_path, "--check")
    assert done.returncode == 0, done.stderr


def test_the_chat_model_of_the_page_is_accepted_with_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"input": "12", "label": "21"}\n')
    model = ROOT / "topologies" / "demo" / "models" / "reverse-digits"
    here = ("--set", f"model.hf_checkpoint={model}", "--set", "model.random_init=true")
    done = start(tmp_path, "--check", *here, topology="chat.toml")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_run_of_the_page_learns(tmp_path: Path) -> None:
    done = start(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["groups"]["trained"]) == (50, 200)
    rows = map(json.loads, (tmp_path / "runs" / result["run"] / "metrics.jsonl").read_text().splitlines())
    assert best_reward([row for row in rows if row["step"] > 0]) > 0.5
    assert "graded samples have the score" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_equal_scores_are_shown_with_a_sample_and_causes_and_the_last_line_starts_over_from_any_folder(
    tmp_path: Path,
) -> None:
    done = start(tmp_path, "--set", "data.0.label_key=question", "--set", "train.num_steps=12")
    assert done.returncode == 0, done.stderr
    assert re.search(r"all of the first \d+ graded samples have the same score, 0", done.stdout)
    assert "typical sample: group " in done.stdout
    assert "  label     '<user>" in done.stdout
    assert "rollout.skip_special_tokens = true" in done.stdout
    (again,) = [line.partition("again")[2] for line in done.stdout.splitlines() if line.startswith("again ")]
    checked = subprocess.run(
        ["bash", "-c", f"{again} --check"], cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert done.stdout.count(f"run dir   {tmp_path}") == 1
