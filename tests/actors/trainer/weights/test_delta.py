"""Deltas from an export's buckets to a copy: bit-exact, small, and found out when anything is damaged."""

import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.trainer.models.shards import bytes_of, entry_of, write_weights
from actors.trainer.weights.delta import DeltaWriter
from actors.trainer.weights.gathering import buckets
from runtime.models.checksums import checksums_of
from runtime.models.delta import Delta, DeltaError, Version, apply_deltas, held_in, read_index, write_index
from runtime.models.safetensors import read_tensors

ROOT = Path(__file__).parents[4]
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
Weights = dict[str, Tensor]


def drawn(seed: int, dtype: torch.dtype = torch.bfloat16, *, num: int = 4, size: int = 40) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{index}.w": (torch.randn(size, 3, generator=generator) * 0.02).to(dtype) for index in range(num)}


def bits(tensor: Tensor) -> bytes:
    return bytes(bytes_of(tensor))


def published(root: Path, number: int, weights: Mapping[str, Tensor]) -> Path:
    """A version in whole files, with what else lies beside them."""
    directory = root / f"v{number:06d}"
    directory.mkdir(parents=True)
    write_weights(weights, directory)
    (directory / "config.json").write_text("{}")
    return directory


def delta_of(root: Path, base: Path, number: int, weights: Mapping[str, Tensor], *, parts: int = 1) -> Path:
    """A directory with a delta, of the weights as an export gives them, by so many ranks."""
    directory = root / f"d{number:06d}"
    directory.mkdir(parents=True)
    before = checksums_of(base)
    tensors = []
    for rank in range(parts):
        own = list(weights.items())[rank::parts]
        writer = DeltaWriter(directory, base, before.tensors, number=rank + 1, total=parts)
        try:
            for bucket in buckets(((entry_of(*pair), pair[1]) for pair in own), 1000):
                writer.add(bucket)
        finally:
            tensors += writer.close()
    write_index(directory, Version(number - 1, before.total), number, tensors)
    return directory


def holds(directory: Path, weights: Mapping[str, Tensor]) -> bool:
    stored = read_tensors(directory)
    return {name: bytes(tensor.data()) for name, tensor in stored.items()} == {
        name: bits(tensor) for name, tensor in weights.items()
    }


def forms(delta: Delta) -> dict[str, str]:
    return {tensor.name: tensor.form for tensor in delta.tensors}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_delta_leads_to_the_version_bit_for_bit(dtype: torch.dtype, parts: int, tmp_path: Path) -> None:
    old = drawn(0, dtype) | {"scale": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["layers.1.w"].view(torch.uint8)[3, 1] ^= 0x80
    new["layers.2.w"] = drawn(1, dtype)["layers.2.w"]
    base = published(tmp_path, 1, old)
    directory = delta_of(tmp_path, base, 2, new, parts=parts)
    assert forms(read_index(directory)) == {
        "empty": "unchanged", "layers.0.w": "unchanged", "layers.1.w": "changes", "layers.2.w": "whole",
        "layers.3.w": "unchanged", "scale": "unchanged",
    }  # fmt: skip
    target = tmp_path / "copy" / "v000002"
    target.parent.mkdir()
    made = apply_deltas(base, [directory], target)
    assert holds(target, new)
    assert holds(base, old)
    assert made == Version(2, checksums_of(target).total) == held_in(target)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors", "version.json"]
    assert (target / "model.safetensors").read_bytes() == (
        published(tmp_path / "whole", 2, new) / "model.safetensors"
    ).read_bytes()


SPECIAL = [0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x80000000, 0, 0x7F800000, 1]  # of float32; cut off, of the others


@given(
    pairs=st.lists(st.tuples(*[st.sampled_from(SPECIAL) | st.integers(0, 2**32 - 1)] * 2), min_size=1, max_size=30),
    kept=st.integers(0, 100),
    dtype=st.sampled_from(DTYPES),
)
def test_any_bits_of_any_dtype_come_back(
    pairs: list[tuple[int, int]], kept: int, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new = (
        {
            "w": torch.tensor([value >> (32 - 8 * dtype.itemsize) for value in [*column, *[3] * kept]])
            .to(INTEGERS[dtype])
            .view(dtype)
        }
        for column in zip(*pairs, strict=True)
    )
    root = tmp_path_factory.mktemp("delta")
    try:
        base = published(root, 1, old)
        apply_deltas(base, [delta_of(root, base, 2, new)], root / "copy")
        assert holds(root / "copy", new)
    finally:
        shutil.rmtree(root)


INTEGERS = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32, torch.float8_e4m3fn: torch.uint8}


def test_a_chain_is_applied_in_one_go_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.trainer.models.shards.SHARD_BYTES", 500)
    versions = [drawn(0)]
    directories = [published(tmp_path, 1, versions[0])]
    assert len(list(directories[0].glob("*.safetensors"))) > 1
    chain = []
    for number in (2, 3, 4):
        weights = {name: tensor.clone() for name, tensor in versions[-1].items()}
        weights[f"layers.{number - 2}.w"][number, 1] += 1
        weights["layers.3.w"][number, 1] += 1
        chain.append(delta_of(tmp_path, directories[-1], number, weights))
        directories.append(published(tmp_path, number, weights))
        versions.append(weights)
    apply_deltas(directories[0], chain, tmp_path / "copy")
    assert holds(tmp_path / "copy", versions[3])
    with pytest.raises(DeltaError, match=r"the base of this delta is version 3 .*, expected version 2 "):
        apply_deltas(directories[0], [chain[0], chain[2]], tmp_path / "other")


@pytest.mark.parametrize(("dtype", "megabytes"), [(torch.bfloat16, 16), (torch.float32, 8), (torch.float8_e4m3fn, 8)])
def test_two_percent_changed_are_at_most_five_percent_of_the_bytes(
    dtype: torch.dtype, megabytes: int, tmp_path: Path
) -> None:
    """And never is the whole model in memory."""
    tensor_bytes = 2_000_000
    shape = (1000, tensor_bytes // dtype.itemsize // 1000)
    generator = torch.Generator().manual_seed(0)
    old = {f"w{i}": (torch.randn(shape, generator=generator) * 0.02).to(dtype) for i in range(megabytes // 2)}
    new = {}
    for name, tensor in old.items():
        flipped = (torch.rand(shape, generator=generator) < 0.02).to(torch.uint8)
        places = torch.zeros(*shape, dtype.itemsize, dtype=torch.uint8)
        places[..., 0] = flipped  # the lowest bit, as one train step changes it
        new[name] = (tensor.view(torch.uint8) ^ places.flatten(1)).view(dtype)
    base = published(tmp_path, 1, old)
    tracemalloc.start()
    try:
        directory = delta_of(tmp_path, base, 2, new)
        apply_deltas(base, [directory], tmp_path / "copy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert holds(tmp_path / "copy", new)
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 0.05 * megabytes * 1e6
    assert peak < 4 * tensor_bytes


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a delta against it: one tensor unchanged, one in changes, one whole."""
    old = drawn(0, num=3, size=8)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["layers.1.w"][5, 1] = 9
    new["layers.2.w"] = -old["layers.2.w"]
    base = published(tmp_path, 1, old)
    return base, delta_of(tmp_path, base, 2, new)


def flipped(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ (1 << bit)]))


def test_any_flipped_byte_of_a_delta_is_found(small: tuple[Path, Path], tmp_path: Path) -> None:
    base, directory = small
    [payloads] = directory.glob("*.bin")
    places = {tensor.begin: tensor.name for tensor in read_index(directory).tensors if tensor.size_bytes}
    for place in range(payloads.stat().st_size):
        name = places[max(begin for begin in places if begin <= place)]
        flipped(payloads, place, place % 8)
        with pytest.raises(DeltaError, match=rf"{payloads.name}: damaged: the CRC of {re.escape(name)} does not match"):
            apply_deltas(base, [directory], tmp_path / "copy")
        flipped(payloads, place, place % 8)
    index = directory / "delta.json"
    for place in range(index.stat().st_size):
        flipped(index, place, place % 8)
        with pytest.raises(DeltaError, match=r"delta\.json: "):
            read_index(directory)
        flipped(index, place, place % 8)
    apply_deltas(base, [directory], tmp_path / "copy")


def test_any_flipped_byte_of_the_base_is_found_and_named(small: tuple[Path, Path], tmp_path: Path) -> None:
    base, directory = small
    form_of = forms(read_index(directory))
    file = base / "model.safetensors"
    for name, tensor in read_tensors(base).items():
        for place in range(tensor.begin, tensor.begin + tensor.size_bytes):
            flipped(file, place, place % 8)
            expected = rf"model\.safetensors: {re.escape(name)} is not that of version 1 \("
            changed_number = form_of[name] == "changes" and (place - tensor.begin) // 2 == 5 * 3 + 1
            if form_of[name] != "whole" and not changed_number:
                with pytest.raises(DeltaError, match=expected):
                    apply_deltas(base, [directory], tmp_path / "copy")
            flipped(file, place, place % 8)
    assert not (tmp_path / "copy").exists()


def test_cut_off_payloads_and_other_tensors_are_named(small: tuple[Path, Path], tmp_path: Path) -> None:
    base, directory = small
    [payloads] = directory.glob("*.bin")
    payloads.write_bytes(payloads.read_bytes()[:-1])
    with pytest.raises(DeltaError, match=r"the file ends before layers\.2\.w does"):
        apply_deltas(base, [directory], tmp_path / "copy")
    weights = drawn(0, num=3, size=8)
    renamed = published(tmp_path / "renamed", 1, {"other" if n == "layers.1.w" else n: t for n, t in weights.items()})
    with pytest.raises(DeltaError, match=r"2 differ, such as layers\.1\.w, which only the delta has"):
        apply_deltas(renamed, [directory], tmp_path / "copy")
    shaped = published(tmp_path / "shaped", 1, weights | {"layers.0.w": torch.zeros(3, 8, dtype=torch.bfloat16)})
    with pytest.raises(DeltaError, match=r"layers\.0\.w is BF16 \[3, 8\]; .* has BF16 \[8, 3\]"):
        apply_deltas(shaped, [directory], tmp_path / "copy")
    with pytest.raises(FileExistsError):
        apply_deltas(base, [directory], base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new": torch.zeros(2)}, r"v000001: has no new"),
        ({"layers.0.w": torch.zeros(8, 4)}, r"layers\.0\.w is BF16 \[8, 3\], now it is F32 \[8, 4\]"),
    ],
)
def test_what_the_base_has_not_has_to_go_whole(changes: Weights, message: str, tmp_path: Path) -> None:
    base = published(tmp_path, 1, drawn(0, num=3, size=8))
    with pytest.raises(DeltaError, match=message):
        delta_of(tmp_path, base, 2, drawn(0, num=3, size=8) | changes)


def test_a_damaged_base_is_named_before_a_delta_is_made_against_it(tmp_path: Path) -> None:
    old = drawn(0)
    base = published(tmp_path, 1, old)
    before = checksums_of(base)
    flipped(base / "model.safetensors", read_tensors(base)["layers.1.w"].begin + 3, 0)
    writer = DeltaWriter(tmp_path, base, before.tensors)
    with pytest.raises(DeltaError, match=r"model\.safetensors: layers\.1\.w is damaged"):
        writer.add(list(drawn(1).items()))
    writer.close()


def test_tensors_of_another_base_are_no_delta(small: tuple[Path, Path], tmp_path: Path) -> None:
    _, directory = small
    tensors = read_index(directory).tensors
    with pytest.raises(DeltaError, match="its base is not version 1"):
        write_index(directory, Version(1, "other"), 2, tensors)
    with pytest.raises(DeltaError, match="its base is not version 1"):
        write_index(directory, read_index(directory).base, 2, tensors[1:])


KILLED = """
import os, signal, sys
from pathlib import Path
import runtime.models.delta as delta
import runtime.util.files as files

moment, base, directory, target = sys.argv[1], *map(Path, sys.argv[2:])
module, name = {"tensor": (delta, "tensor_checksum"), "end": (files, "complete_directory")}[moment]
original, left = getattr(module, name), [2 if moment == "tensor" else 1]

def dies(*arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

setattr(module, name, dies)
delta.apply_deltas(base, [directory], target)
"""


@pytest.mark.parametrize("moment", ["tensor", "end"])
def test_a_death_leaves_the_old_copy_and_nothing_that_looks_whole(
    moment: str, small: tuple[Path, Path], tmp_path: Path
) -> None:
    base, directory = small
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    target = tmp_path / "copy"
    command = [sys.executable, "-c", KILLED, moment, str(base), str(directory), str(target)]
    assert subprocess.run(command, cwd=ROOT, timeout=200, check=False).returncode == -signal.SIGKILL
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    assert not target.exists()
    assert (tmp_path / ".copy").exists()
    apply_deltas(base, [directory], target)
    assert not (tmp_path / ".copy").exists()
    assert checksums_of(target).total == read_index(directory).target.checksum


def test_a_copy_that_nobody_noted_says_nothing(tmp_path: Path) -> None:
    assert held_in(tmp_path) is None
    (tmp_path / "version.json").write_text("[1")
    assert held_in(tmp_path) is None
