"""A node's own copies: of whole files and of changes, made once, mended when damaged, and no more than are needed."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runtime.models.copies as copies_module
from actors.trainer.weights.publish import Published, Versions
from runtime.models.checksums import checksums_of
from runtime.models.copies import CopyFailed, damage_of, make_copy
from runtime.models.delta import Version, apply_deltas, held_in
from runtime.models.safetensors import read_tensors
from runtime.models.versions import on_disk, versions_in
from tests.support.published import changed, drawn, flip, publish

ROOT = Path(__file__).parents[3]


@pytest.fixture
def published(tmp_path: Path) -> list[Published]:
    """Six versions, of which the first and the fifth are whole."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    versions, weights, found = Versions(tmp_path / "weights", model, every=4), drawn(), []
    for number in range(1, 7):
        found.append(publish(versions, number, weights))
        weights = changed(weights, number)
    assert [each.base_version for each in found] == [0, 1, 2, 3, 0, 5]
    return found


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return tmp_path / "copies"


def copy_of(published: list[Published], number: int, copies: Path, *, doubted: bool = False) -> Path:
    each = published[number - 1]
    assert each.path is not None
    return make_copy(Version(number, each.checksum), each.path, copies, doubted=doubted)


def is_right(copy: Path, published: list[Published], number: int) -> bool:
    return checksums_of(copy).total == published[number - 1].checksum


def numbers(root: Path) -> list[int]:
    return [number for number, _ in versions_in(root)]


def seen_chains(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """From which directory, over which changes, copies are made from now on."""
    chains: list[tuple[str, list[str]]] = []

    def apply_and_note(copy: Path, deltas: list[Path], target: Path) -> Version:
        chains.append((f"{copy.parent.name}/{copy.name}", [delta.name for delta in deltas]))
        return apply_deltas(copy, deltas, target)

    monkeypatch.setattr(copies_module, "apply_deltas", apply_and_note)
    return chains


def test_each_version_is_made_of_the_one_before_and_whole_ones_are_copied(
    published: list[Published], copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = seen_chains(monkeypatch)
    for number in range(1, 7):
        copy = copy_of(published, number, copies)
        assert copy == copies / f"v00000{number}"
        assert is_right(copy, published, number)
        assert held_in(copy) == Version(number, published[number - 1].checksum)
        assert sorted(file.name for file in copy.iterdir()) == ["config.json", "model.safetensors", "version.json"]
        assert numbers(copies) == [max(1, number - 1), number][-min(number, 2) :]
    assert chains == [
        *((f"copies/v00000{number - 1}", [f"v00000{number}"]) for number in (2, 3, 4)),
        ("copies/v000005", ["v000006"]),
    ]


def test_a_copy_that_is_there_is_not_made_again(published: list[Published], copies: Path) -> None:
    first = copy_of(published, 2, copies)
    before = (first / "model.safetensors").stat()
    assert copy_of(published, 2, copies, doubted=True) == first
    assert (first / "model.safetensors").stat().st_ino == before.st_ino


def test_who_comes_late_gets_the_whole_version_and_the_changes_since(
    published: list[Published], copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = seen_chains(monkeypatch)
    assert is_right(copy_of(published, 4, copies), published, 4)
    assert chains == [("weights/v000001", ["v000002", "v000003", "v000004"])]
    assert numbers(copies) == [4]
    assert is_right(copy_of(published, 6, copies), published, 6)  # past the whole one
    assert chains[1:] == [("weights/v000005", ["v000006"])]


def test_a_damaged_copy_is_found_and_the_next_one_made_of_whole_files(
    published: list[Published], copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = copy_of(published, 2, copies)
    flip(held / "model.safetensors", read_tensors(held)["layers.0.w"].begin)
    chains = seen_chains(monkeypatch)
    assert is_right(copy_of(published, 3, copies), published, 3)
    assert [base for base, _ in chains] == ["copies/v000002", "weights/v000001"]


def test_a_copy_that_an_engine_doubts_is_looked_at_and_mended(published: list[Published], copies: Path) -> None:
    held = copy_of(published, 1, copies)
    flip(held / "model.safetensors", -1)
    assert copy_of(published, 1, copies) == held
    assert not is_right(held, published, 1)
    assert copy_of(published, 1, copies, doubted=True) == held
    assert is_right(held, published, 1)


def test_changes_that_are_damaged_fail_by_name_and_the_next_whole_version_mends_it(
    published: list[Published], copies: Path
) -> None:
    copy_of(published, 2, copies)
    damaged = published[2].path
    assert damaged is not None
    flip(damaged / "delta-00001-of-00001.bin", 0)
    for number in (3, 4):
        with pytest.raises(
            CopyFailed, match=r"v000003/delta-00001-of-00001\.bin: damaged: the CRC of layers\.1\.w does not match"
        ):
            copy_of(published, number, copies)
    assert numbers(copies) == [2]
    assert is_right(copy_of(published, 5, copies), published, 5)
    assert is_right(copy_of(published, 6, copies), published, 6)


def test_damaged_whole_files_are_not_copied(published: list[Published], copies: Path) -> None:
    whole = published[0].path
    assert whole is not None
    flip(whole / "model.safetensors", -1)
    with pytest.raises(CopyFailed, match=r"v000001: is not version 1: its checksum is"):
        copy_of(published, 1, copies)
    assert numbers(copies) == []


def test_a_chain_with_a_gap_is_refused_in_words(published: list[Published], copies: Path) -> None:
    gone = published[1].path
    assert gone is not None
    (gone / "published.json").write_text("[1")
    assert [each.version.number for each in on_disk(gone.parent)] == [1, 3, 4, 5, 6]
    with pytest.raises(CopyFailed, match=r"version 3 cannot be made from nothing: .*version 2 .* has neither"):
        copy_of(published, 3, copies)


def test_a_model_directory_that_nobody_published_is_copied_as_a_whole_version(tmp_path: Path, copies: Path) -> None:
    """As with run.only = "rollout"."""
    from actors.trainer.models.shards import write_weights

    (model := tmp_path / "some-model").mkdir()
    write_weights(drawn(), model)
    checksum = checksums_of(model).total
    assert make_copy(Version(3, checksum), model, copies) == copies / "v000003"
    assert checksums_of(copies / "v000003").total == checksum


KILLED = """
import os, signal, sys
from pathlib import Path
import runtime.util.files as files
from runtime.models.copies import make_copy
from runtime.models.delta import Version

number, checksum, published, copies = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
files.complete_directory = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
make_copy(Version(number, checksum), published, copies)
"""


def test_a_death_while_changes_are_applied_leaves_what_is_there(published: list[Published], copies: Path) -> None:
    held = copy_of(published, 2, copies)
    each = published[2]
    command = [sys.executable, "-c", KILLED, "3", each.checksum, str(each.path), str(copies)]
    assert subprocess.run(command, cwd=ROOT, timeout=200, check=False).returncode == -signal.SIGKILL
    assert sorted(path.name for path in copies.iterdir()) == [".v000003", "v000002"]
    assert is_right(held, published, 2)
    assert is_right(copy_of(published, 3, copies), published, 3)
    assert sorted(path.name for path in copies.iterdir()) == ["v000002", "v000003"]


def test_a_copy_that_is_there_is_compared_with_the_announced_files(published: list[Published], copies: Path) -> None:
    for number in (1, 2):  # a copy of whole files, and one that changes led to
        each = published[number - 1]
        assert each.path is not None
        version = Version(number, each.checksum)
        copy = make_copy(version, each.path, copies, files=each.files)
        assert damage_of(copy, version, each.files) == ""
        flip(copy / "model.safetensors", -1)
        assert damage_of(copy, version, each.files).startswith(f"{copy}/model.safetensors: damaged: its CRC-32 is ")
        assert make_copy(version, each.path, copies, files=each.files) == copy
        assert is_right(copy, published, number)


def test_a_copy_whose_tensors_are_right_is_not_damaged_whatever_its_files_are(
    published: list[Published], copies: Path
) -> None:
    each = published[0]
    assert each.path is not None
    version = Version(1, each.checksum)
    copy = make_copy(version, each.path, copies, files=each.files)
    (copy / "config.json").write_text("{ }")
    assert damage_of(copy, version, each.files) == ""


def test_what_is_published_and_cannot_become_a_copy_is_said_to_be_unusable(
    published: list[Published], copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    each = published[0]
    assert each.path is not None
    with monkeypatch.context() as patched:
        patched.setattr("runtime.models.copies.shutil.copyfile", no_room)
        with pytest.raises(CopyFailed, match="No space left") as failed:
            copy_of(published, 1, copies)
    assert not failed.value.unusable
    flip(each.path / "model.safetensors", -1)
    with pytest.raises(CopyFailed) as damaged:
        copy_of(published, 1, copies)
    assert damaged.value.unusable
