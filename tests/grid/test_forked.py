"""Forked ranks end with their program, a rank that fails ends the others, and a single rank is no fork."""

from pathlib import Path

import pytest

from tests.grid.running import run_ranks

PROGRAM = """
import multiprocessing, sys, time
from pathlib import Path
from tests.grid.forked import fork_ranks

def main(rank, world, port, place, word):
    (place / f"{rank} of {world}").write_text(word)
    if word == "alone":
        assert multiprocessing.parent_process() is None, "a fork of this program"
    if word == "fails":
        assert rank, "rank 0 fails, the others wait"
        time.sleep(600)

if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[3]), sys.argv[4])
"""


def test_each_rank_is_a_fork_and_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_ranks(program, tmp_path, "works", world=3, timeout_s=30)
    assert {path.name for path in tmp_path.glob("* of 3")} == {"0 of 3", "1 of 3", "2 of 3"}
    with pytest.raises(AssertionError, match=r"^1"):
        run_ranks(program, tmp_path, "fails", world=2, timeout_s=30)


def test_a_single_rank_is_no_fork_so_that_it_can_use_a_gpu(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_ranks(program, tmp_path, "alone", world=1, timeout_s=30)
    assert (tmp_path / "0 of 1").read_text() == "alone"
