"""bin/start-topology --only: what it refuses, and where it says so."""

from pathlib import Path

import pytest

from runtime.data.dump_files import write_pair
from tests.bin.test_start_topology import TOPOLOGY, run, started
from tests.runtime.data.test_dumps import example


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two groups of two samples."""
    directory = tmp_path / "dump"
    directory.mkdir()
    write_pair(directory, 0, [example(0), example(1)], (1, 1))
    return directory


def small(dump: Path, batch_size: int) -> tuple[str, ...]:
    settings = ("rollout.n_samples_per_prompt=2", f"rollout.rollout_batch_size={batch_size}")
    return ("--only", "trainer", "--load", str(dump), *(word for item in settings for word in ("--set", item)))


def test_the_trainer_alone_needs_a_dump_and_nobody_else_takes_one(tmp_path: Path) -> None:
    done = run(str(TOPOLOGY), "--only", "trainer")
    assert (done.returncode, done.stderr) == (
        2,
        "--only trainer needs a dump: name its directory with --load DIR\n",
    )
    done = run(str(TOPOLOGY), "--only", "rollout", "--load", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "--load DIR needs --only trainer\n")


def test_a_dump_that_does_not_fit_is_wrong_input(dump: Path, tmp_path: Path) -> None:
    with started(tmp_path / "r", ["1"], more=small(dump, 3)) as command:
        assert command.end() == 2
    assert "has 2 groups to train on, fewer than a batch: rollout.rollout_batch_size = 3" in command.lines[-1]
    (dump / "rollout_0.jsonl").write_text("{}\n")
    with started(tmp_path / "r", ["1"], more=small(dump, 2)) as command:
        assert command.end() == 2
    assert f"{dump / 'rollout_0.jsonl'}:1: " in command.lines[-1]
    assert not (tmp_path / "r").exists()


def test_a_run_is_as_short_as_its_dump_and_stays_one_half(dump: Path, tmp_path: Path) -> None:
    with started(tmp_path / "r", ["0", "--then", "input_error"], more=small(dump, 1)) as command:
        assert command.end() == 2
    assert f"note: {dump} has groups for 2 train steps only" in command.lines
    assert any(line.endswith(f"--only trainer --load {dump}") for line in command.lines)
    settings = ("--set", "rollout.n_samples_per_prompt=2", "--set", "rollout.rollout_batch_size=1")
    with started(tmp_path / "r", ["1"], more=("--only", "rollout", *settings)) as command:
        assert command.end() == 2
    assert '  run.only: "trainer" → "rollout"' in command.lines


def test_a_directory_for_dumps_that_cannot_be_made_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(str(TOPOLOGY), "--check", "--set", f"run.dump_details={tmp_path / 'file' / 'dump'}")
    assert done.returncode == 2
    assert f'run.dump_details = "{tmp_path / "file" / "dump"}": {tmp_path / "file"} is a file' in done.stderr
