"""Full disks: how they are recognised, and what is said of them."""

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.node.supervisor.output import OutputLog
from runtime.process.main import exit_code_of
from runtime.util.disk import (
    LinesWhileRoom,
    NoSpace,
    free_bytes,
    is_full,
    no_space,
    no_space_of,
    stored_bytes,
    writing,
)
from runtime.util.exit_codes import EXIT_NO_SPACE
from tests.support.small_disk import fill, small_disk


def test_a_full_disk_is_recognised_by_its_number_or_by_its_words() -> None:
    assert is_full(OSError(errno.ENOSPC, "x"))
    assert is_full(OSError(errno.EDQUOT, "x"))
    assert is_full(NoSpace("x"))
    assert is_full(OSError("weights could not be written: rank 0: OSError: [Errno 28] No space left on device"))
    assert not is_full(OSError(errno.EACCES, "x"))
    assert not is_full(RuntimeError("unexpected pos 704 vs 598"))


def test_what_is_said_names_the_path_and_the_bytes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as place:
        assert str(no_space(place / "not" / "there", 2_000_000)) == (
            f"no space left on the disk for {place}/not/there: 2,000,000 bytes needed, 1,048,576 bytes free; "
            "free some, and the same command continues the run"
        )
        fill(place, 4096)
        assert free_bytes(place) == 4096
        with pytest.raises(NoSpace, match="5,000 bytes needed, 0 bytes free"), writing(place / "f", 5000):
            (place / "f").write_bytes(b"x" * 5000)
        with pytest.raises(NoSpace), writing(place / "f", 5000):
            raise RuntimeError("unexpected pos 704 vs 598")  # what torch makes of a write that fails
    with pytest.raises(RuntimeError, match="another"), writing(tmp_path / "f", 5000):
        raise RuntimeError("another")
    named = no_space_of(OSError(errno.ENOSPC, "No space left on device", "/a/file"), tmp_path)
    assert str(named).startswith("no space left on the disk for /a/file")


def test_lines_of_a_log_are_dropped_while_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as place:
        log = LinesWhileRoom((place / "log").open("w"))
        log.write("first\n")
        log.flush()
        filler = fill(place)
        for _ in range(5000):
            log.write("lost\n")
            log.flush()
        filler.unlink()
        log.write("last\n")
        log.close()
        lines = (place / "log").read_text().splitlines()
        assert (lines[0], lines[-1]) == ("first", "last")


def test_a_process_that_meets_a_full_disk_is_not_started_again_and_says_so_in_one_line(tmp_path: Path) -> None:
    error = ExceptionGroup("actors", [ValueError("x"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
    assert exit_code_of(error) == EXIT_NO_SPACE
    log = OutputLog(tmp_path / "a.jsonl", "trainer")
    log.feed(b'{"level": "error", "event": "actor_failed", "error": "no space left for /x: 5 bytes"}\n')
    log.close()
    assert log.why() == "no space left for /x: 5 bytes"


def test_a_file_system_that_does_not_tell_its_size_counts_as_empty() -> None:
    assert os.statvfs("/proc").f_blocks == 0
    assert free_bytes("/proc") > 1 << 60


def test_files_that_go_while_they_are_counted_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "stays").write_bytes(b"x" * 100)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for number in range(10):
                (tmp_path / f"{number}").mkdir()
                (tmp_path / f"{number}" / "file").write_bytes(b"")
                shutil.rmtree(tmp_path / f"{number}")

    with ThreadPoolExecutor(1) as executor:
        executor.submit(come_and_go)
        try:
            assert {stored_bytes(tmp_path) for _ in range(3000)} == {100}
        finally:
            over.set()
