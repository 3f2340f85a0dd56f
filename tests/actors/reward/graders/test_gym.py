"""Tasks of reasoning-gym, from the package itself in an interpreter of its own."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import chdir, closing
from pathlib import Path

import anyio
import pytest
from filelock import FileLock

from actors.reward.graders.gym.tasks import Gym, GymError
from actors.reward.grades import GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample
from runtime.functions.load import load
from runtime.functions.table import SOURCE
from tests.docs.snippets import snippets
from tests.support.extra_packages import FOLDER

REQUIREMENT = "reasoning-gym==0.1.25"
PAGE = Path(__file__).parents[4] / "docs" / "train" / "reasoning-gym.md"


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter with reasoning-gym, made once."""
    folder, stamp = FOLDER / "gym", FOLDER / "gym" / "made"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "gym.lock"):
        if not stamp.exists():
            venv.create(folder, clear=True)  # our pip installs into it: one of its own takes seconds
            command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q"]
            command += ["--no-compile", REQUIREMENT]
            subprocess.run(command, check=True, timeout=300)
            stamp.touch()
    return folder / "bin" / "python"


@pytest.fixture
def gym(python: Path) -> Iterator[Gym]:
    gym = Gym({"chain_sum": {"max_terms": 3, "weight": 2}, "word_ladder": {}}, seed=3, python=python)
    yield gym
    gym.close()


@pytest.mark.slow
def test_a_task_is_a_function_of_seed_and_number(gym: Gym, python: Path) -> None:
    """Also in another process and another order; word_ladder depends on the order of a set."""
    rows = [gym.row(number) for number in range(6)]
    again = Gym({"chain_sum": {"max_terms": 3, "weight": 2}, "word_ladder": {}}, seed=3, python=python)
    assert [again.row(number) for number in reversed(range(6))] == rows[::-1]
    again.close()
    assert {row["metadata"]["task"] for row in rows} == {"chain_sum", "word_ladder"}
    other = Gym({"chain_sum": {"max_terms": 3, "weight": 2}, "word_ladder": {}}, seed=4, python=python)
    assert other.row(0) != rows[0]
    other.close()


@pytest.mark.slow
def test_answers_are_scored_by_the_task(gym: Gym) -> None:
    row = next(row for number in range(12) if (row := gym.row(number))["metadata"]["task"] == "chain_sum")
    expression = row["input"].split(":")[1].split("=")[0]
    right = sum(int(term) for term in expression.replace("- ", "-").replace("+ ", "").split())
    assert row["label"] == str(right)  # by hand, without the package

    def score(response: str) -> float:
        return gym.grade(GradedSample(response=response, metadata=row["metadata"]))

    assert score(f"<answer>1</answer> no: <answer> {right} </answer>") == 1.0
    assert score(f"<answer>{right + 1}</answer>") == 0.0
    assert score(f"<think><answer>{right}</answer></think> none") == 0.0
    assert score(str(right)) == 0.0  # without the tags


PARTS = """
import json, sys
import reasoning_gym
from reasoning_gym.factory import DATASETS

def score(tasks, answer, entry):
    try:
        return float(tasks.score_answer(answer, entry))
    except Exception:
        return 0.0

found = []
for name in sorted(DATASETS.keys() - {"composite"}):
    tasks = reasoning_gym.create_dataset(name, seed=1, size=3)
    entries = [entry for entry in tasks if entry["answer"] is not None]
    if any(score(tasks, "zzz", entry) < score(tasks, f"-{entry['answer']}", entry) < 1 for entry in entries):
        found.append(name)
json.dump([len(DATASETS) - 1, found], sys.stderr)
"""


@pytest.mark.nightly
def test_the_page_names_the_tasks_that_pay_for_a_wrong_answer_with_the_label(python: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [str(python), "-P", "-s", "-c", PARTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    number, names = json.loads(done.stderr.splitlines()[-1])
    page = " ".join((PAGE.parents[1] / "reference" / "reasoning-gym.md").read_text().split())
    said = re.search(r"In these (\d+) of the (\d+) tasks .*?: (`.*?`)\. ", page)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(names), number)
    assert said[3].replace("`", "").split(", ") == names


@pytest.mark.slow
def test_only_a_full_score_counts_if_the_gym_is_exact(python: Path) -> None:
    """Wrong answers that contain the label, in tasks with the package's own rule and with rules of their own."""
    wrong = {"chain_sum": "-{}", "products": "1{}", "gcd": "{}1", "leg_counting": "It is {}.", "sudoku": "-{}"}
    wrong |= {"countdown": "-{}", "word_sorting": "-{}"}
    for exact in (False, True):
        with closing(Gym({task: {} for task in wrong}, seed=3, python=python, exact=exact)) as gym:
            rows = {row["metadata"]["task"]: row for row in map(gym.row, range(60))}
            assert rows.keys() == wrong.keys()
            for task, row in rows.items():
                answers = row["label"], wrong[task].format(row["label"])
                samples = [GradedSample(response=f"<answer>{a}</answer>", metadata=row["metadata"]) for a in answers]
                full, part = map(gym.grade, samples)
                assert full == 1.0
                assert part == 0.0 if exact else 0.0 < part < 1.0, task


@pytest.mark.slow
def test_a_task_that_cannot_be_made_is_an_error_and_the_next_one_works(gym: Gym, python: Path) -> None:
    reasons = list[str]()
    with closing(Gym({"chain_sums": {}, "chain_sum": {"terms": 1}}, python=python)) as wrong:
        for number in range(6):
            with pytest.raises(GymError) as refused:
                wrong.row(number)
            reasons.append(str(refused.value))
    assert {("not registered" in reason, "terms" in reason) for reason in reasons} == {(True, False), (False, True)}
    with pytest.raises(GymError, match="no task 'leg_counting' here; there are: chain_sum, word_ladder"):
        gym.grade(GradedSample(response="<answer>1</answer>", metadata={"task": "leg_counting", "seed": 1}))
    slow = Gym({"chain_sum": {}}, python=python, timeout_s=1e-6)
    with pytest.raises(GymError, match="gave no answer"):
        slow.row(0)
    slow.close()
    gym.close()  # as if the process had died
    assert gym.row(0)["input"]


@pytest.mark.slow
def test_the_files_of_the_page_feed_and_grade_a_run(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are made as in the buffer actor, and graded in the process set-up of a run."""
    (tmp_path / "puzzles.py").write_text(snippets(PAGE, "python")[0].replace(".venv-gym/bin/python", str(python)))
    (topology,) = (tomllib.loads(block) for block in snippets(PAGE, "toml"))
    data = topology["data"][0]
    monkeypatch.syspath_prepend(tmp_path)  # held_out.py imports puzzles.py
    make = load(SOURCE, "source", data["source"], [tmp_path]).function
    row = make(5)
    samples = [
        GradedSample(response=f"<answer>{row['label']}</answer>", metadata=row["metadata"]),
        GradedSample(response="<answer>no</answer>", metadata=row["metadata"]),
    ]

    async def graded() -> list[float | None]:
        settings = PoolSettings(hello=Hello(base_dirs=(str(tmp_path),)), num_processes=1, timeout_s=60.0)
        with anyio.fail_after(200):
            async with open_pool(settings) as pool:
                grades = await pool.grade(GraderSpec(name=data["rm_type"]), samples)
        assert [grade.error for grade in grades] == [None, None]
        return [grade.reward for grade in grades]

    assert anyio.run(graded) == [1.0, 0.0]
    with chdir(tmp_path):
        exec(snippets(PAGE, "python")[1].replace("+ 200", "+ 2"), {"__name__": "held_out"})
    held_out = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [sorted(line) for line in held_out] == [["input", "label", "metadata"]] * 2
    make.__self__.close()  # type: ignore[attr-defined] - the method of a Gym


@pytest.fixture
def slow_import(tmp_path: Path) -> Path:
    """An interpreter whose reasoning-gym takes 1.5 s to import."""
    (tmp_path / "reasoning_gym.py").write_text("""
import time
time.sleep(1.5)
class Tasks(list):
    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])
def create_dataset(name, seed, size):
    return Tasks([{"question": name, "answer": "7"}])
""")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')  # without -P
    script.chmod(0o755)
    return script


def test_the_time_of_a_task_is_without_the_import(slow_import: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gym = Gym({"sevens": {}}, python=slow_import, timeout_s=1.0)
    sample = GradedSample(response="<answer>7</answer>", metadata={"task": "sevens", "seed": 1})
    assert gym.grade(sample) == 1.0
    gym.close()
    monkeypatch.setattr("actors.reward.graders.gym.tasks.IMPORT_S", 0.1)
    with pytest.raises(GymError, match=r"nothing after 0.1 s \(the import of reasoning-gym\)"):
        gym.grade(sample)


def test_an_interpreter_without_the_package_is_refused_with_the_extra() -> None:
    gym = Gym({"chain_sum": {}}, python=sys.executable)
    with pytest.raises(GymError, match=r'has no reasoning-gym: pip install "physarum\[gym\]"'):
        gym.row(0)
    gym.close()
    with pytest.raises(GymError, match="cannot be started"):
        Gym({"chain_sum": {}}, python=f"{os.sep}no{os.sep}python").row(0)
    with pytest.raises(ValueError, match="at least one task"):
        Gym({})
