"""Forked ranks end with their program, a rank that fails ends the others and is named, a single rank is no fork."""

from pathlib import Path

import pytest

from tests.grid.running import run_ranks

PROGRAM = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from tests.grid.forked import begin_job, fork_ranks

def main(rank, world, listener, place, word):
    begin_job(place, rank, f"the job {word}", stuck_s=600)
    (place / f"{rank} of {world}").write_text(word)
    if word == "alone":
        assert multiprocessing.parent_process() is None, "a fork of this program"
    if word == "fails":
        assert rank, "rank 0 fails, the others wait"
    if word == "dies" and rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if word in ("fails", "dies"):
        time.sleep(600)

if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[2]), sys.argv[3])
"""


def run(place: Path, word: str, *, world: int) -> None:
    program = place / "program.py"
    program.write_text(PROGRAM)
    run_ranks(program, place, word, world=world, timeout_s=50)


def test_each_rank_is_a_fork_and_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    run(tmp_path, "works", world=3)
    assert {path.name for path in tmp_path.glob("* of 3")} == {"0 of 3", "1 of 3", "2 of 3"}
    with pytest.raises(AssertionError, match=r"program fails ended with exit code 1") as failed:
        run(tmp_path, "fails", world=2)
    text = str(failed.value)
    assert "jobs: rank 0 in 'the job fails'" in text
    assert "AssertionError: rank 0 fails, the others wait" in text
    assert "rank 0 ended with exit code 1\n" in text


def test_a_rank_that_is_killed_is_named_with_its_job(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"program dies ended with exit code 1") as failed:
        run(tmp_path, "dies", world=2)
    assert "rank 1 in 'the job dies'" in str(failed.value)
    assert "rank 1 ended with exit code -9\n" in str(failed.value)


def test_a_single_rank_is_no_fork_so_that_it_can_use_a_gpu(tmp_path: Path) -> None:
    run(tmp_path, "alone", world=1)
    assert (tmp_path / "0 of 1").read_text() == "alone"
