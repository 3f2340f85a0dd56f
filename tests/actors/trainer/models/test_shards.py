"""Safetensors files written as their tensors come, read by the safetensors package."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.trainer.models import shards
from actors.trainer.models.files import file_source
from actors.trainer.models.shards import (
    ShardWriter,
    bytes_of,
    cut_into_shards,
    entry_of,
    named,
    write_index,
    write_weights,
)
from runtime.models.checksums import checksums_of
from runtime.models.file_sums import sum_of

WEIGHTS = {
    "model.b": torch.arange(6.0).reshape(2, 3),
    "model.a": torch.randn(5, 8).bfloat16(),
    "model.c.weight": torch.ones(3),
    "model.d": torch.arange(12.0).reshape(3, 4).t(),  # not contiguous
}


def test_a_streamed_file_is_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    write_weights(WEIGHTS, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == WEIGHTS.keys()
    assert all(
        torch.equal(tensor, WEIGHTS[name]) and tensor.dtype == WEIGHTS[name].dtype for name, tensor in read.items()
    )
    (tmp_path / "theirs").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in WEIGHTS.items()}, tmp_path / "theirs" / "model.safetensors"
    )
    assert checksums_of(tmp_path) == checksums_of(tmp_path / "theirs")


def test_checksums_reckoned_on_the_way_are_those_of_the_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, named([[entry_of(name, tensor) for name, tensor in WEIGHTS.items()]]))
    for name, tensor in WEIGHTS.items():
        writer.write(name, bytes_of(tensor))
    assert dict(sorted(writer.checksums.items())) == checksums_of(tmp_path).tensors
    assert writer.files == {"model.safetensors": sum_of(tmp_path / "model.safetensors")}


def test_shards_are_at_most_so_large_and_a_larger_tensor_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 36)
    cut = cut_into_shards([entry_of(name, tensor) for name, tensor in WEIGHTS.items()])
    assert [[entry.name for entry in shard] for shard in cut] == [
        ["model.b"],
        ["model.a"],
        ["model.c.weight"],
        ["model.d"],
    ]
    monkeypatch.setattr(shards, "SHARD_BYTES", 104)
    write_weights(WEIGHTS, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    read = file_source(tmp_path)
    assert all(torch.equal(read(name), tensor) for name, tensor in WEIGHTS.items())


def test_shards_of_several_ranks_are_numbered_through(tmp_path: Path) -> None:
    entries = [entry_of(name, tensor) for name, tensor in WEIGHTS.items()]
    ranks = [named([entries[:2]], before=0, total=3), named([entries[2:3], entries[3:]], before=1, total=3)]
    assert [shard.file for shards in ranks for shard in shards] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    for own in ranks:
        writer = ShardWriter(tmp_path, own)
        for entry in (entry for shard in own for entry in shard.entries):
            writer.write(entry.name, bytes_of(WEIGHTS[entry.name]))
    write_index(tmp_path, [shard for own in ranks for shard in own])
    read = file_source(tmp_path)
    assert all(torch.equal(read(name), tensor) for name, tensor in WEIGHTS.items())


def test_a_tensor_that_was_not_planned_next_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, named([[entry_of(name, tensor) for name, tensor in WEIGHTS.items()]]))
    with pytest.raises(ValueError, match=r"received model\.a of 80 bytes; expected model\.b of 24"):
        writer.write("model.a", bytes_of(WEIGHTS["model.a"]))
