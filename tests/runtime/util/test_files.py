"""Writing whole files: what a reader sees, and that each step is synced before the next counts on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.util import files
from runtime.util.files import (
    append_line,
    atomic_directory,
    atomic_file,
    begin_directory,
    complete,
    complete_directory,
    hidden_name,
    write_atomically,
)

ROOT = Path(__file__).parents[3]


def test_a_file_is_replaced_at_once_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_old_content_and_no_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def fail() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_synced_before_it_gets_its_name_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "a.json", list[tuple[str, bool]]()
    sync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", noting)
    write_atomically(path, b"x")
    assert [Path(name).parent == tmp_path or Path(name) == tmp_path for name, _ in synced] == [True, True]
    assert synced[1] == (str(tmp_path), True)
    assert not synced[0][1]
    partial = tmp_path / "partial"
    partial.write_bytes(b"y")
    complete(partial, path)
    assert synced[2] == (str(partial), True)
    append_line(tmp_path / "rows.jsonl", b"{}")
    append_line(tmp_path / "rows.jsonl", b"{}")
    names = [Path(name).name for name, _ in synced[4:]]
    assert names == ["rows.jsonl", tmp_path.name, "rows.jsonl"]
    assert (tmp_path / "rows.jsonl").read_bytes() == b"{}\n{}\n"


def test_all_of_a_directory_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, path, synced = tmp_path / ".v1", tmp_path / "v1", list[tuple[str, bool]]()
    (partial / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (partial / name).write_bytes(b"x")

    def noting(descriptor: int) -> None:
        synced.append((os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path), path.exists()))

    monkeypatch.setattr(files.os, "fsync", noting)
    complete_directory(partial, path)
    *before, after = synced
    assert sorted(before) == [(name, False) for name in (".v1", ".v1/a", ".v1/b", ".v1/inner", ".v1/inner/c")]
    assert after == (".", True)
    assert sorted(each.name for each in path.iterdir()) == ["a", "b", "inner"]


def test_a_file_that_a_crash_left_with_another_mode_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / f".password.{os.getpid()}"
    left.touch(mode=0o644)
    write_atomically(tmp_path / "password", b"x")
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_directory_gets_its_name_once_it_is_written(tmp_path: Path) -> None:
    left = begin_directory(tmp_path / "v1")  # a crash leaves it
    (left / "half").touch()
    with atomic_directory(tmp_path / "v1") as partial:
        (partial / "a").write_bytes(b"x")
        assert partial == hidden_name(tmp_path / "v1")
        assert list(tmp_path.iterdir()) == [partial]
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["v1", "v1/a"]


def test_a_directory_whose_writer_fails_is_removed(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "v1") as partial:
            (partial / "a").write_bytes(b"x")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert not list(tmp_path.iterdir())


def test_the_machines_own_python_can_load_it() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import runtime.util.files"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], check=True, timeout=200)


def test_what_is_written_whole_is_its_owners_alone(tmp_path: Path) -> None:
    partial, before = tmp_path / ".export", os.umask(0)
    try:
        (partial / "inner").mkdir(parents=True)
        (partial / "inner" / "weights").write_bytes(b"x")
        complete_directory(partial, tmp_path / "export")
        write_atomically(tmp_path / "samples", b"x")
        write_atomically(tmp_path / "of-all", b"x", mode=0o644)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {
        "export": 0o700,
        "export/inner": 0o700,
        "export/inner/weights": 0o600,
        "samples": 0o600,
        "of-all": 0o644,
    }
