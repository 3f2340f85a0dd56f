"""Published weights: whole, checked, and gone when nobody needs them."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.trainer.commands import TrainerRank
from actors.trainer.models.files import random_source
from actors.trainer.models.shards import write_weights
from actors.trainer.weights.publish import Versions, Written
from runtime.models.checksums import checksums_of
from tests.actors.trainer.tiny import TINY, random_batch
from tests.build.topology import MakeTopology

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def write_version(root: Path, version: int, model_dir: Path) -> tuple[Path, int]:
    versions = Versions(root, model_dir)
    begun = versions.begin(version)
    write_weights(WEIGHTS, begun.whole)
    published = versions.complete(begun, Written(checksums_of(begun.whole).tensors))
    assert published.path is not None
    return published.path, published.size_bytes


def test_a_version_holds_weights_and_configuration(root: Path, model_dir: Path) -> None:
    path, size_bytes = write_version(root, 7, model_dir)
    assert path == root / "v000007"
    assert size_bytes == (path / "model.safetensors").stat().st_size
    assert json.loads((path / "config.json").read_text()) == TINY
    assert torch.equal(load_file(path / "model.safetensors")["a"], WEIGHTS["a"])


def test_what_a_crash_left_under_a_version_is_written_over(root: Path, model_dir: Path) -> None:
    for name in ("v000001", ".v000001"):
        (root / name).mkdir(parents=True)
        (root / name / "model.safetensors").write_bytes(b"half")
    path, _ = write_version(root, 1, model_dir)
    assert len(load_file(path / "model.safetensors")) == 2
    assert [path.name for path in root.iterdir()] == ["v000001"]


def test_a_version_is_synced_to_the_disk_before_it_is_there(
    root: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    path, _ = write_version(root, 7, model_dir)
    unfinished = {str(root / f".{path.name}" / file.name) for file in path.iterdir()}
    assert unfinished < set(synced)
    assert synced[-1] == str(root)


@pytest.mark.parametrize(("confirmed", "left"), [(0, [1, 2, 3, 4, 5]), (2, [2, 3, 4, 5]), (4, [4, 5]), (5, [4, 5])])
def test_old_versions_go_once_an_engine_holds_a_newer_one(root: Path, confirmed: int, left: list[int]) -> None:
    for version in range(1, 6):
        (root / f"v{version:06d}").mkdir(parents=True)
    Versions(root, root).prune(confirmed=confirmed)
    assert sorted(int(path.name[1:]) for path in root.iterdir()) == left


def test_an_engine_publishes_what_it_trains(make_topology: MakeTopology, tmp_path: Path) -> None:
    topology = make_topology()
    engine = TrainerRank(topology, tmp_path)
    first = load_file(engine.publish(1, confirmed=0).path / "model.safetensors")
    drawn = random_source(engine._replica.hf, topology.run.seed)
    assert all(torch.equal(weight, drawn(name)) for name, weight in first.items())
    engine.train(random_batch())
    second = load_file(engine.publish(2, confirmed=0).path / "model.safetensors")
    assert not any(torch.equal(weight, second[name]) for name, weight in first.items())


def test_an_exported_model_stands_on_its_own(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{}")
    (model_dir / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "half").touch()
    TrainerRank(make_topology(), tmp_path).export(tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
