"""Checks before a start run in a forked process, whatever the process had that forks."""

import gc
import os
import resource
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.node.checks.apart import Doing, apart
from runtime.settings.load import load_topology

LAPTOP = Path(__file__).parents[4] / "topologies/laptop.toml"


class OfOneProcess:
    """Like a process group of torch, whose destructor waits for threads that a forked process does not have."""

    def __init__(self) -> None:
        self.cycle, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os.kill(os.getpid(), signal.SIGSEGV)


def test_what_the_forking_process_left_to_the_garbage_collector_is_not_collected_in_the_forked_one() -> None:
    def collected(doing: Doing) -> bool:
        doing("run.name", "r", "collecting garbage")
        gc.collect()
        return True

    gc.disable()
    try:
        OfOneProcess()
        assert apart(load_topology(LAPTOP), collected, bool, print)
    finally:
        gc.enable()


def test_the_beginning_of_what_is_printed_without_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(doing: Doing) -> bool:
        os.write(1, b"x" * 3_000_000)
        sys.stderr.write("y" * 2_000_000 + "\n")
        return True

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notes: list[str] = []
    assert apart(load_topology(LAPTOP), printing, bool, notes.append)
    (note,), (file,) = notes, tmp_path.iterdir()
    assert f"printed 5,000,001 bytes, the first {4 << 20:,} of them: {file}" in note
    assert file.read_bytes() == b"x" * 3_000_000 + b"y" * ((4 << 20) - 3_000_000)
    assert file.stat().st_mode & 0o077 == 0


def test_a_process_with_many_open_files_is_answered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):  # select() takes none above 1,023
            opened.enter_context(open(os.devnull))
        assert apart(load_topology(LAPTOP), lambda _: True, bool, print)
