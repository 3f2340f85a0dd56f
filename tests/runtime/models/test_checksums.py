"""Checksums of safetensors files: the stated algorithm, by hand; shards; damage."""

import hashlib
import json
from pathlib import Path

import pytest

from runtime.models.checksums import checksums_of, combined, tensor_checksum
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE, read_tensors

A, B = bytes(range(8)), bytes(range(100, 112))


def test_checksums_follow_the_stated_algorithm(tmp_path: Path) -> None:
    write_safetensors(tmp_path / SINGLE_FILE, {"b": ("BF16", [2, 3], B), "a": ("F32", [2], A)})
    of_a = hashlib.sha256(b'["a","F32",[2]]\n' + A).hexdigest()
    of_b = hashlib.sha256(b'["b","BF16",[2,3]]\n' + B).hexdigest()
    checksums = checksums_of(tmp_path)
    assert checksums.tensors == {"a": of_a, "b": of_b}
    assert checksums.total == hashlib.sha256(f"{of_a}\n{of_b}\n".encode()).hexdigest()


def test_shards_have_the_checksum_of_the_single_file(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write_safetensors(whole / SINGLE_FILE, {"a": ("F32", [2], A), "b": ("BF16", [2, 3], B)})
    write_safetensors(parts / "1.safetensors", {"b": ("BF16", [2, 3], B)})
    write_safetensors(parts / "2.safetensors", {"a": ("F32", [2], A)})
    index = {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    (parts / INDEX_FILE).write_text(json.dumps(index))
    assert checksums_of(parts) == checksums_of(whole)


def test_name_dtype_shape_and_data_all_count() -> None:
    checksums = {
        tensor_checksum("a", "F32", [2], A),
        tensor_checksum("b", "F32", [2], A),
        tensor_checksum("a", "I32", [2], A),
        tensor_checksum("a", "F32", [2, 1], A),
        tensor_checksum("a", "F32", [2], A[::-1]),
    }
    assert len(checksums) == 5
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"})
    assert combined({"a": "1", "b": "2"}).total != combined({"a": "2", "b": "1"}).total


def test_damaged_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=SINGLE_FILE):
        checksums_of(tmp_path)
    write_safetensors(tmp_path / SINGLE_FILE, {"a": ("F32", [2], A)})
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for damaged in (whole[:-1], b"\xff" * 16, b"abc", b"", whole[:8] + b"x" * (len(whole) - 8)):
        (tmp_path / SINGLE_FILE).write_bytes(damaged)
        with pytest.raises(ValueError, match=SINGLE_FILE):
            checksums_of(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="gone"):
        checksums_of(tmp_path)
    (tmp_path / INDEX_FILE).write_text("[]")
    with pytest.raises(ValueError, match=INDEX_FILE):
        checksums_of(tmp_path)


@pytest.mark.parametrize("way", ["up", "absolute", "link", "single link"])
def test_an_index_opens_no_file_outside_its_directory(tmp_path: Path, way: str) -> None:
    outside, directory = tmp_path / "other.safetensors", tmp_path / "model"
    write_safetensors(outside, {"a": ("F32", [2], A)})
    directory.mkdir()
    name = {"up": "../other.safetensors", "absolute": str(outside)}.get(way, "link.safetensors")
    if way == "link":
        (directory / name).symlink_to(outside)
    if way == "single link":
        (directory / SINGLE_FILE).symlink_to(outside)
    else:
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (checksums_of, read_tensors):
        with pytest.raises(ValueError, match=f"leads out of {directory}, to {outside}"):
            read(directory)


def test_an_index_that_names_no_files_is_not_understood(tmp_path: Path) -> None:
    for names in ({"a": 3}, {"a": None}, ["a"]):
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match="not an index of safetensors shards"):
            checksums_of(tmp_path)


def test_a_snapshot_in_the_cache_of_hugging_face_is_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    write_safetensors(blobs / "77aa", {"a": ("F32", [2], A)})
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE_FILE).symlink_to(Path("..", "..", "blobs", "77aa"))
    assert {name: tensor.shape for name, tensor in read_tensors(snapshot).items()} == {"a": (2,)}
    (tmp_path / "here").symlink_to(snapshot)
    assert {name: tensor.shape for name, tensor in read_tensors(tmp_path / "here").items()} == {"a": (2,)}


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """The safetensors format, written from its specification."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    head = json.dumps(header).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data for _, _, data in tensors.values()))
