"""What runs note in the user's state directory, and which run directories are the user's own because of it."""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from runtime.node.claims import started
from runtime.node.claims.started import note_start, was_started_here
from runtime.node.reopen import find_run
from runtime.node.supervisor.guardian import MARK_VARIABLE, mark_of
from tests.support.other_user import open_directory

AS_ANOTHER_USER = "import os, time; os.setgid(65534); os.setuid(65534); print(flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "physarum" / "runs"


def run_in(directory: Path, run_id: str = "x1") -> Path:
    directory.mkdir(mode=0o700)
    (directory / "topology.json").write_text(json.dumps({"run": {"name": "r"}, "data": [{"path": "rows.jsonl"}]}))
    (directory / "run-id.json").write_text(json.dumps({"id": run_id, "joined": True}))
    return directory


def note(directory: Path) -> None:
    """As a start in a directory does."""
    anyio.run(note_start, directory, "x1")


def is_foreign(directory: Path) -> bool:
    return find_run(str(directory)).foreign


def test_a_directory_is_own_once_a_run_was_started_in_it(tmp_path: Path, state: Path) -> None:
    run_dir = run_in(tmp_path / "r")
    assert is_foreign(run_dir)
    note(run_dir)
    assert not is_foreign(run_dir)
    assert find_run(str(run_dir)).asked == ()
    (tmp_path / "link").symlink_to(run_dir)
    assert not is_foreign(tmp_path / "link")
    (file,) = state.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state, file)] == [0o700, 0o600]
    assert file.stat().st_size < 1000


def test_a_copy_and_a_moved_and_a_replaced_directory_may_be_a_strangers(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    shutil.copytree(run_dir, tmp_path / "copy")
    assert is_foreign(tmp_path / "copy")
    run_dir.rename(tmp_path / "moved")
    assert is_foreign(tmp_path / "moved")
    (tmp_path / "copy").rename(run_dir)
    assert is_foreign(run_dir)


def test_another_run_in_the_same_directory_may_be_a_strangers(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    for text in (json.dumps({"id": "x2", "joined": True}), "{", ""):
        (run_dir / "run-id.json").write_text(text)
        assert is_foreign(run_dir)
    (run_dir / "run-id.json").unlink()
    assert is_foreign(run_dir)


@pytest.mark.parametrize("place", [".", "topology.json"])
def test_what_others_can_write_may_be_a_strangers(tmp_path: Path, place: str) -> None:
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    (run_dir / place).chmod(0o770)
    assert is_foreign(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("of", ["directory", "topology", "notes", "note"])
def test_what_belongs_to_another_user_may_be_a_strangers(tmp_path: Path, state: Path, of: str) -> None:
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    (file,) = state.iterdir()
    places = {"directory": run_dir, "topology": run_dir / "topology.json", "notes": state, "note": file}
    os.chown(places[of], 65534, 65534)
    assert is_foreign(run_dir)


def test_a_damaged_or_readable_note_counts_for_nothing(tmp_path: Path, state: Path) -> None:
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    (file,) = state.iterdir()
    file.chmod(0o644)
    assert not was_started_here(run_dir)
    file.chmod(0o600)
    assert was_started_here(run_dir)
    file.write_text("[]")
    assert not was_started_here(run_dir)
    note(run_dir)
    assert was_started_here(run_dir)


def test_notes_of_deleted_directories_are_removed(tmp_path: Path, state: Path) -> None:
    (tmp_path / "disk").mkdir()
    there, deleted = run_in(tmp_path / "disk" / "r"), run_in(tmp_path / "deleted")
    for directory in (there, deleted):
        note(directory)
    shutil.rmtree(deleted)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    note(run_in(tmp_path / "next"))
    noted = {json.loads(path.read_text())["directory"] for path in state.iterdir()}
    assert noted == {str(tmp_path / "disk" / "r"), str(tmp_path / "next")}
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert not is_foreign(there)


def test_the_oldest_notes_are_removed(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "MOST", 3)
    directories = [run_in(tmp_path / f"r{number}") for number in range(5)]
    for number, directory in enumerate(directories):
        note(directory)
        os.utime(max(state.iterdir(), key=lambda path: path.stat().st_mtime), (number, number))
    assert [is_foreign(directory) for directory in directories] == [True, True, False, False, False]


def test_starts_at_the_same_time_are_all_noted(tmp_path: Path) -> None:
    directories = [run_in(tmp_path / f"r{number}") for number in range(4)]
    program = "import anyio, sys; from pathlib import Path; from runtime.node.claims.started import note_start\n"
    program += "for _ in range(20):\n    anyio.run(note_start, Path(sys.argv[1]), 'x1')"
    begun = [subprocess.Popen([sys.executable, "-c", program, str(directory)]) for directory in directories]
    assert [process.wait(60) for process in begun] == [0, 0, 0, 0]
    assert [is_foreign(directory) for directory in directories] == [False] * 4


def test_a_state_directory_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_in(tmp_path / "r")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with capture_logs() as lines:
        note(run_dir)
    assert [line["event"] for line in lines] == ["start_not_noted"]
    assert str(tmp_path / "file") in lines[0]["reason"]
    assert is_foreign(run_dir)


@pytest.mark.parametrize("chosen", ["", "relative"])
def test_the_state_directory_is_that_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", chosen)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_dir = run_in(tmp_path / "r")
    note(run_dir)
    assert not is_foreign(run_dir)
    assert len(list((tmp_path / "home" / ".local" / "state" / "physarum" / "runs").iterdir())) == 1


def test_a_user_without_a_home_starts_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name)

    def no_user(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_user)
    run_dir = run_in(tmp_path / "r")
    with capture_logs() as lines:
        note(run_dir)
    assert "HOME and XDG_STATE_HOME are not set" in lines[0]["reason"]
    assert is_foreign(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_that_another_user_hides_makes_no_directory_roots_own() -> None:
    """Linux forbids to read the memory of a process that changed its user. Its files in /proc belong to root then."""
    with open_directory() as directory:
        run_dir = run_in(directory / "r")
        environment = {MARK_VARIABLE: mark_of("x", "local", run_dir)}
        command = [sys.executable, "-I", "-S", "-c", AS_ANOTHER_USER]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"\n"
                assert is_foreign(run_dir)
            finally:
                process.kill()
