"""A run on a disk that becomes full: one line that says where and how much, an end in order, and it continues."""

import json
from pathlib import Path

import pytest

from tests.bin.test_start_topology import run, started, wait_for_none
from tests.support.small_disk import fill, small_disk

MIB = 1 << 20


def test_a_disk_that_is_too_small_is_refused_with_the_bytes_that_are_needed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 3 * MIB) as place:
        for more in (["--check"], []):
            done = run("topologies/laptop.toml", "--set", f"run.dir={place}", *more)
            assert (done.returncode, done.stdout) == (2, "")
            (line,) = done.stderr.splitlines()
            assert line.endswith(f": {place}: a run needs at least 9,437,184 bytes; 3,145,728 are free")


@pytest.mark.slow
@pytest.mark.parametrize("leave_bytes", [0, pytest.param(300 << 10, marks=pytest.mark.nightly)])
def test_a_disk_that_becomes_full_ends_the_run_with_one_line_and_it_continues_once_there_is_room(
    tmp_path: Path, leave_bytes: int
) -> None:
    go = tmp_path / "go"
    players = ["3", "--wait", str(go)]
    with small_disk(tmp_path / "small", 16 * MIB) as place:
        run_dir = place / "r"
        with started(run_dir, players, more=("--json",)) as command:
            command.until(" 3/200")
            filler = fill(place, leave_bytes)
            assert command.end() == 1
        wait_for_none(run_dir)
        said = "\n".join(command.lines)
        assert "Traceback" not in said
        assert "Errno" not in said
        (line,) = [line for line in command.lines if line.startswith("run r failed: ")]
        assert line.startswith(f"run r failed: no space left on the disk for {run_dir}: ")
        assert " bytes needed, " in line
        assert line.endswith(" bytes free; free some, and the same command continues the run")
        assert json.loads(command.lines[-1])["steps"] == 3
        assert [
            line for line in command.lines if line.startswith("continue  cd ") and " && bin/start-topology " in line
        ]
        filler.unlink()
        go.touch()
        with started(run_dir, players, more=("--json",)) as command:
            assert command.end() == 0
        assert any(line.startswith("resuming run r in ") for line in command.lines)
