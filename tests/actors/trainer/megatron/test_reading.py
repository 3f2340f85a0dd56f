"""Checkpoints of strangers: nothing that their files name is run, and no file outside is opened."""

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from actors.trainer.commands import TrainerRank
from actors.trainer.export import CannotExport, export_run
from actors.trainer.file_checksums import write_checksums
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.reading import UnsafeCheckpoint
from runtime.models.checkpoint_files import CHECKSUMS_FILE
from runtime.settings.topology import encode_topology
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.mark),)


@pytest.fixture
def rank(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> TrainerRank:
    """A trainer with a checkpoint in its run directory."""
    (model_dir / "tokenizer.json").write_text("{}")
    topology = make_topology()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "topology.json").write_bytes(encode_topology(topology))
    rank = TrainerRank(topology, tmp_path / "run")
    save(rank, step=1, incarnation=1)
    return rank


@pytest.fixture
def saved(rank: TrainerRank, tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints" / "0001" / "step-00000001"


def rewrite(saved: Path, change: Callable[[Metadata], None]) -> None:
    """Change the index of a checkpoint."""
    index = pickle.loads((saved / ".metadata").read_bytes())
    change(index)
    (saved / ".metadata").write_bytes(pickle.dumps(index))


def refused(rank: TrainerRank, saved: Path, tmp_path: Path) -> str:
    """Why neither an export nor a trainer reads it; nothing is written. Strangers write checksums, too."""
    (saved / CHECKSUMS_FILE).unlink()
    write_checksums(saved, {})
    with pytest.raises((UnsafeCheckpoint, CannotExport)) as exported:
        export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UnsafeCheckpoint) as loaded:
        load_checkpoint(rank._replica, saved)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "out").exists()
    if isinstance(exported.value, CannotExport):  # found while the files are compared with their checksums
        assert "leads out of" in str(exported.value)
        assert "leads out of" in str(loaded.value)
    else:
        assert str(exported.value) == str(loaded.value)
    return str(loaded.value)


def test_an_index_that_names_a_function_is_not_loaded(rank: TrainerRank, saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    reason = refused(rank, saved, tmp_path)
    assert reason.startswith(f"{saved / '.metadata'} is not the index of a checkpoint: it names posix.mknod, ")


def test_an_index_cannot_reach_functions_through_the_types_that_it_may_name(
    rank: TrainerRank, saved: Path, tmp_path: Path
) -> None:
    (saved / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nX\x08\x00\x00\x00__init__tR.")
    assert "'__init__' of something that is not an Enum" in refused(rank, saved, tmp_path)


def test_an_object_among_the_tensors_runs_nothing(rank: TrainerRank, saved: Path, tmp_path: Path) -> None:
    """A tensor that the index calls bytes is unpickled by torch's own planner."""
    buffer = io.BytesIO()
    torch.save(Evil(tmp_path / "evil"), buffer)
    (saved / "__9_9.distcp").write_bytes(buffer.getvalue())

    def change(index: Metadata) -> None:
        name = next(name for name, kind in index.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata))
        for key, stored in index.storage_data.items():
            if key.fqn == name:
                place = {"relative_path": "__9_9.distcp", "offset": 0, "length": len(buffer.getvalue())}
                index.storage_data[key] = replace(stored, **place)

    rewrite(saved, change)
    reason = refused(rank, saved, tmp_path)
    assert "_extra_state" in reason
    assert "names posix.mknod, which is neither a tensor nor a plain value" in reason


def test_the_plain_values_beside_the_tensors_run_nothing(rank: TrainerRank, saved: Path, tmp_path: Path) -> None:
    torch.save({"step": Evil(tmp_path / "evil")}, saved / "common.pt")
    assert refused(rank, saved, tmp_path).startswith(f"{saved / 'common.pt'} names posix.mknod, ")


@pytest.mark.parametrize("way", ["up", "absolute", "link"])
def test_tensors_are_read_from_the_directory_of_the_checkpoint_alone(
    rank: TrainerRank, saved: Path, tmp_path: Path, way: str
) -> None:
    (saved / "__0_0.distcp").rename(tmp_path / "elsewhere")
    names = {"up": "../../../../elsewhere", "absolute": str(tmp_path / "elsewhere"), "link": "__0_0.distcp"}
    if way == "link":
        (saved / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")

    def change(index: Metadata) -> None:
        index.storage_data = {
            key: replace(stored, relative_path=names[way]) for key, stored in index.storage_data.items()
        }

    rewrite(saved, change)
    assert f"{names[way]!r} leads out of {saved}, to " in refused(rank, saved, tmp_path)


def test_a_damaged_index_is_named(rank: TrainerRank, saved: Path, tmp_path: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(whole[: len(whole) // 2])
    assert refused(rank, saved, tmp_path).startswith(f"{saved / '.metadata'} is not the index of a checkpoint: ")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"half",
    "nested": lambda data: b'{"a":' * 100_000,
    "its head": lambda data: bytes(64) + data[64:],
    "its end": lambda data: data[:-64] + bytes(64),
    "a byte in the middle": lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :],
    "another key": lambda data: data.replace(b"_version", b"_verse"),
}


def error_of(read: Callable[[], object]) -> str | None:
    try:
        read()
    except (CannotExport, ValueError, OSError) as error:
        return str(error)
    return None


def test_a_damaged_file_is_an_error_that_names_the_checkpoint_or_changes_nothing(
    rank: TrainerRank, saved: Path, tmp_path: Path
) -> None:
    """Checksums do not help: strangers write them, too."""
    names = ("__0_0.distcp", ".metadata", "common.pt", "metadata.json", "run.json")
    kept, refused = {name: (saved / name).read_bytes() for name in names}, set[tuple[str, str]]()
    for name in names:
        for damage, change in DAMAGES.items():
            (saved / name).write_bytes(change(kept[name]))
            (saved / CHECKSUMS_FILE).unlink()
            write_checksums(saved, {})
            for error in (
                error_of(partial(export_run, tmp_path / "run", tmp_path / f"{name} {damage}")),
                error_of(partial(load_checkpoint, rank._replica, saved)),
            ):
                assert error is None or str(saved) in error or "of the checkpoint" in error, (name, damage)
                refused |= set() if error is None else {(name, damage)}
        (saved / name).write_bytes(kept[name])
    for damage in ("empty", "half", "zeros", "text", "nested"):
        assert {name for name in names if (name, damage) in refused} == set(names), damage
