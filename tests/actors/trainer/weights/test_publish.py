"""Which versions go whole and which as changes, what stays on the disk, and what a trainer's death leaves."""

from pathlib import Path

import pytest
import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.models.shards import write_weights
from actors.trainer.weights.export import weight_thread
from actors.trainer.weights.files import DeltaBase, export_to_files
from actors.trainer.weights.gathering import own_parts
from actors.trainer.weights.publish import Published, Versions, Written, newest_whole
from runtime.models.checksums import checksums_of
from runtime.models.copies import make_copy
from runtime.models.delta import Version
from runtime.models.safetensors import read_tensors
from runtime.models.versions import versions_in
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.published import changed, drawn, flip, publish


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def versions(root: Path, model_dir: Path) -> Versions:
    return Versions(root, model_dir, every=3)


def numbers(root: Path) -> list[int]:
    return [number for number, _ in versions_in(root)]


def publish_many(versions: Versions, count: int) -> list[Published]:
    weights, published = drawn(), []
    for number in range(1, count + 1):
        published.append(publish(versions, number, weights))
        weights = changed(weights, number)
    return published


def test_of_so_many_versions_one_is_whole(versions: Versions, root: Path) -> None:
    published = publish_many(versions, 7)
    assert [each.base_version for each in published] == [0, 1, 2, 0, 4, 5, 0]
    assert {each.size_bytes for each in published} == {published[0].size_bytes}
    for each in published:
        assert each.path is not None
        names = sorted(file.name for file in each.path.iterdir())
        if each.base_version:
            assert names == ["delta-00001-of-00001.bin", "delta.json", "published.json"]
            assert each.delta_bytes == sum(file.stat().st_size for file in each.path.iterdir())
        else:
            assert names == ["config.json", "model.safetensors", "published.json"]
            assert each.checksum == checksums_of(each.path).total
    assert sorted(path.name for path in root.iterdir()) == ["base", *(f"v00000{number}" for number in range(1, 8))]
    assert numbers(root / "base") == []  # the next base lies where it is published


def test_a_version_that_is_changes_has_whole_files_of_the_trainer_s_own(versions: Versions, root: Path) -> None:
    published = publish_many(versions, 3)
    assert numbers(root / "base") == [3]
    assert checksums_of(root / "base" / "v000003").total == published[2].checksum
    assert newest_whole(root) == (3, root / "base" / "v000003")


def test_a_trainer_that_starts_publishes_a_whole_version(versions: Versions, root: Path, model_dir: Path) -> None:
    publish_many(versions, 2)
    for left in (".v000003", ".delta-v000003", "v000003"):  # of a death before the announcement
        (root / left).mkdir()
        (root / left / "delta.json").touch()
    again = publish(Versions(root, model_dir, every=3), 3, drawn(5))
    assert again.base_version == 0
    assert again.path is not None
    assert checksums_of(again.path).total == again.checksum
    assert sorted(path.name for path in root.iterdir()) == ["base", "v000001", "v000002", "v000003"]
    assert numbers(root / "base") == []


def test_a_version_goes_whole_when_it_is_told_to(versions: Versions) -> None:
    weights = drawn()
    publish(versions, 1, weights)
    assert publish(versions, 2, weights, whole=True).base_version == 0
    assert publish(versions, 3, weights).base_version == 2


@pytest.mark.parametrize("reason", ["rank 1: no space", ""])
def test_a_version_goes_whole_when_what_changed_cannot_be_had(versions: Versions, root: Path, reason: str) -> None:
    publish(versions, 1, drawn())
    begun = versions.begin(2)
    write_weights(drawn(1), begun.whole)
    published = versions.complete(begun, Written(checksums_of(begun.whole).tensors, (), reason))  # no tensor's changes
    assert published.base_version == 0
    assert published.path is not None
    assert checksums_of(published.path).total == published.checksum
    assert sorted(path.name for path in root.iterdir()) == ["v000001", "v000002"]


@pytest.mark.parametrize(("confirmed", "left"), [(0, range(1, 9)), (6, [4, 5, 6, 7, 8]), (7, [7, 8]), (8, [7, 8])])
def test_what_leads_to_a_version_that_stays_stays(
    versions: Versions, root: Path, confirmed: int, left: list[int]
) -> None:
    """Of eight versions 1, 4 and 7 are whole."""
    publish_many(versions, 8)
    versions.prune(confirmed=confirmed)
    assert numbers(root) == list(left)


def test_a_damaged_base_or_other_tensors_make_a_version_go_whole(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)

    def written(name: str, delta_base: DeltaBase | None) -> Written:
        (tmp_path / name).mkdir()
        parts = own_parts([built], hf)
        device = torch.device("cpu")
        with weight_thread() as thread:
            return export_to_files(
                parts, hf, tmp_path / name, thread, device=device, bucket_bytes=3000, delta_base=delta_base
            ).finish()

    checksums = written("one", None).checksums
    name = "model.norm.weight"
    (tmp_path / "delta").mkdir()
    delta_base = DeltaBase(tmp_path / "delta", tmp_path / "one", checksums)
    with torch.no_grad():
        built.decoder.final_layernorm.weight.add_(1.0)
    good = written("two", delta_base)
    assert good.no_delta == ""
    assert {tensor.name for tensor in good.tensors if tensor.form != "unchanged"} == {name}
    flip(tmp_path / "one" / "model.safetensors", read_tensors(tmp_path / "one")[name].begin)
    damaged = written("three", delta_base)
    assert damaged.checksums == good.checksums
    assert f"rank 0: {tmp_path}/one/model.safetensors: {name} is damaged" in damaged.no_delta
    other = written(
        "four", delta_base._replace(checksums={key: value for key, value in checksums.items() if key != name})
    )
    assert f"has no {name}" in other.no_delta
    gone = written("five", delta_base._replace(base=tmp_path / "gone"))
    assert "rank 0: " in gone.no_delta
    assert gone.checksums == good.checksums


@pytest.mark.parametrize("copies", [False, True])
def test_trained_versions_come_out_of_their_changes(make_topology: MakeTopology, tmp_path: Path, copies: bool) -> None:
    rank = TrainerRank(make_topology(trainer={"full_export_interval": 3}), tmp_path / "run")
    for number in range(1, 5):
        if copies:
            begun = rank.begin_publish(number)
            while rank.advance_publish()[0]:
                pass
            published = rank.finish_publish(begun, confirmed=number - 1)
        else:
            published = rank.publish(number, confirmed=number - 1)
        assert published.base_version == (0 if number in (1, 4) else number - 1)
        assert published.path is not None
        copy = make_copy(Version(number, published.checksum), published.path, tmp_path / "copies")
        assert checksums_of(copy).total == published.checksum
        rank.train(random_batch())
    assert numbers(tmp_path / "copies") == [3, 4]
    assert numbers(tmp_path / "run" / "weights") == [1, 2, 3, 4]
