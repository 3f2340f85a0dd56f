"""A run is dumped; the trainer alone learns the same from the dump, and rollout alone runs without training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.data.dump_files import read_pair, steps_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
STEPS, BATCH, SAMPLES = 3, 8, 4
SMALL = (f"train.num_steps={STEPS}", f"rollout.rollout_batch_size={BATCH}", f"rollout.n_samples_per_prompt={SAMPLES}")


def start(cwd: Path, name: str, *words: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A whole run of the laptop topology, small; its result."""
    command = [
        sys.executable,
        str(ROOT / "bin" / "start_topology.py"),
        str(ROOT / "topologies" / "laptop.toml"),
        *words,
    ]
    settings = (*SMALL, "eval.0.interval=2", f"run.name={name}", *overrides)
    command += ["--json", *(word for setting in settings for word in ("--set", setting))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def rows(cwd: Path, name: str) -> list[dict[str, Any]]:
    """The metrics of each train step."""
    lines = (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def samples(dump: Path) -> list[Any]:
    """Every sample of a dump by step, without the names of its group."""
    assert steps_in(dump) == list(range(STEPS))
    return [
        (step, sample.prompt, sample.response, sample.reward, [segment.response_ids.tolist() for segment in segments])
        for step in steps_in(dump)
        for group in read_pair(dump, step)
        for sample, segments in zip(group.samples, group.segments, strict=True)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a whole run and of its dump; tests only read it."""
    directory = tmp_path_factory.mktemp("whole")
    result = start(directory, "whole", overrides=("run.dump_details=dump",))
    assert result["groups"]["trained"] == STEPS * BATCH
    return directory


def test_the_trainer_alone_learns_the_same_from_a_dump(whole: Path, tmp_path: Path) -> None:
    dump = whole / "dump"
    again = start(tmp_path, "again", "--only", "trainer", "--load", str(dump), overrides=("run.dump_details=second",))
    assert again["groups"]["trained"] == STEPS * BATCH
    assert again["eval_last"] is None
    first = samples(dump)
    assert len(first) == STEPS * BATCH * SAMPLES
    assert first == samples(tmp_path / "second")
    same = (
        "train/loss",
        "train/grad_norm",
        "rollout/raw_reward",
        "rollout/response_lengths",
        "rollout/truncated_ratio",
    )
    for one, other in zip(rows(whole, "whole"), rows(tmp_path, "again"), strict=True):
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    logs = {path.stem for path in (tmp_path / "runs" / "again" / "logs").iterdir()}
    assert not {name for name in logs if name.startswith(("engine", "router", "reward"))}
    assert list((tmp_path / "runs" / "again").glob("weights/v*")) == []


def test_a_run_on_a_shorter_dump_ends_with_the_dump(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "dump", tmp_path / "dump", ignore=shutil.ignore_patterns("rollout_[1-9]*"))
    shorter = start(tmp_path, "shorter", "--only", "trainer", "--load", "dump")
    assert (shorter["steps"], shorter["groups"]["trained"]) == (1, BATCH)


def test_rollout_alone_runs_to_its_end_on_the_same_weights(tmp_path: Path) -> None:
    result = start(tmp_path, "alone", "--only", "rollout", overrides=("run.dump_details=dump",))
    groups = result["groups"]
    assert groups["issued"] == groups["trained"] == STEPS * BATCH
    assert result["eval_last"] is not None
    assert len(samples(tmp_path / "dump")) == STEPS * BATCH * SAMPLES
    run = tmp_path / "runs" / "alone"
    assert "trainer.jsonl" not in {path.name for path in (run / "logs").iterdir()}
    assert [path.name for path in (run / "weights").iterdir()] == ["drawn"]
    assert not (run / "checkpoints").exists()
