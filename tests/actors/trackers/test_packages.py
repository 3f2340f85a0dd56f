"""The packages of trackers, in the environments of bin/setup --with: killed at any moment, and read back."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.small_disk import fill, small_disk
from tests.support.trackers import logged_by_mlflow, logged_by_swanlab, logged_by_wandb, scalars, tracker_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # setting the environments up may take minutes

ROOT: Final = Path(__file__).parents[3]
NUM_KILLS: Final = 3
ROWS_OF_A_LIFE: Final = 40


class Rows:
    """A run directory whose metrics.jsonl grows."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.number = 0
        (run_dir / "run-id.json").write_text('{"id": "0123456789abcdef", "joined": true}')
        (run_dir / "topology.json").write_text('{"run": {"name": "r"}}')

    def add(self, count: int) -> None:
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            for _ in range(count):
                self.number += 1
                row: dict[str, Any] = {"step": self.number, "time": 1e9 + self.number, "train/loss": self.number / 2}
                row |= {f"rollout/metric_{index}": index for index in range(60)}
                row |= {"eval/step": self.number, "eval/set": 0.5} if self.number % 5 == 0 else {}
                file.write(json.dumps(row) + "\n")

    def started(self, name: str, **options: Any) -> "subprocess.Popen[str]":
        known = {"run": "r", "optimizer_steps": 1, "always_use_train_step": False, "mode": "offline"}
        return subprocess.Popen(
            [tracker_python(name), "-P", "-m", "actors.trackers", name, json.dumps(known | options)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PHYSARUM_RUN_DIR": str(self.run_dir)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def expected(self) -> dict[str, list[int]]:
        """Steps of each axis."""
        steps = range(1, self.number + 1)
        zero_based = [step - 1 for step in steps]
        return {"train": zero_based, "rollout": zero_based, "eval": [step for step in steps if step % 5 == 0]}


def lives(rows: Rows, name: str, moments: random.Random) -> Iterator[str]:
    """Kill the tracker with its children at random moments while rows come, then let the last process end."""
    for _ in range(NUM_KILLS):
        process = rows.started(name)
        assert process.stderr is not None
        yield process.stderr.readline()
        rows.add(moments.randrange(1, ROWS_OF_A_LIFE))
        try:
            process.wait(moments.uniform(0.0, 2.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=200)
    rows.add(5)
    last = rows.started(name)
    last.send_signal(signal.SIGTERM) if last.stderr is not None and last.stderr.readline() else None
    _, told = last.communicate(timeout=60)
    assert last.returncode == 0, told


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tensorboard", scalars),
        ("wandb", logged_by_wandb),
        pytest.param("swanlab", logged_by_swanlab, marks=pytest.mark.nightly),
        pytest.param("mlflow", logged_by_mlflow, marks=pytest.mark.nightly),
    ],
)
def test_killed_at_any_moment_it_holds_every_step_once(
    tmp_path: Path, name: str, read: Callable[[Path], dict[str, list[int]]]
) -> None:
    rows = Rows(tmp_path / "r")
    told = list(lives(rows, name, random.Random(1)))
    assert len(told) == NUM_KILLS
    found, expected = read(rows.run_dir), rows.expected()
    assert found["train/loss"] == expected["train"]
    assert found["eval/set"] == expected["eval"]
    assert all(found[f"rollout/metric_{index}"] == expected["rollout"] for index in range(60))
    directories = list((rows.run_dir / "wandb").glob("offline-run-*"))
    assert len(directories) == (NUM_KILLS + 1 if name == "wandb" else 0)


def test_a_full_disk_ends_it_and_the_next_process_logs_the_rest(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "r")
    rows.add(200)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        filler = fill(disk, leave_bytes=64 << 10)
        full = rows.started("tensorboard", dir=str(disk))
        _, told = full.communicate(timeout=60)
        assert full.returncode == 1, told
        assert "No space left on device" in told
        filler.unlink()
        last = rows.started("tensorboard", dir=str(disk))
        assert last.stderr is not None
        assert "holds 0 points" not in last.stderr.readline()
        last.send_signal(signal.SIGTERM)
        last.communicate(timeout=60)
        assert scalars(disk / "r-01234567", pattern=".")["train/loss"] == rows.expected()["train"]


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "r")
    python = tracker_python("tensorboard")
    done = subprocess.run(
        [python, "-P", "-m", "actors.trackers", "wandb", '{"run": "r"}'],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PHYSARUM_RUN_DIR": str(rows.run_dir)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert f"wandb is not installed in {python}: run bin/setup --with wandb" in done.stderr
