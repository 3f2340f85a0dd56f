"""Weights on their way to files: their checksum, what a failure says, and how much memory it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.trainer.weights.cast import FORMS
from actors.trainer.weights.export import copied, weight_thread
from actors.trainer.weights.files import export_to_files
from actors.trainer.weights.gathering import own_parts
from runtime.models.checksums import checksums_of
from runtime.models.file_sums import sum_of
from runtime.models.safetensors import read_tensors
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.weights.export_peaks import BUCKET, COPY_BUCKET, LARGEST, MB

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_files_have_all_tensors_and_the_checksum_that_is_told(tmp_path: Path, bucket_bytes: int) -> None:
    reference = write_model(tmp_path)
    built, hf = load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    told = export_to_files(
        own_parts([built], hf), hf, out, weight_thread(), device=CPU, bucket_bytes=bucket_bytes
    ).finish()
    assert told.checksum == checksums_of(out).total == checksums_of(tmp_path).total
    assert told.files == {file.name: sum_of(file) for file in out.iterdir()}
    assert {name: tensor.shape for name, tensor in read_tensors(out).items()} == {
        name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()
    }


def test_a_directory_that_cannot_be_written_fails_with_the_rank_and_the_reason(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    export = export_to_files(
        own_parts([built], hf), hf, tmp_path / "gone", weight_thread(), device=CPU, bucket_bytes=3000
    )
    with pytest.raises(OSError, match=r"could not be written to .*/gone: rank 0: FileNotFoundError: .*gone"):
        export.finish()


def test_a_copy_is_written_as_it_was_while_the_model_changes(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    export = export_to_files(copied(own_parts([built], hf)), hf, out, weight_thread(), device=CPU, bucket_bytes=3000)
    steps = 0
    while export.advance():
        with torch.no_grad():
            built.decoder.final_layernorm.weight.add_(1.0)
        if export.pending is not None:
            export.pending.result(40)
        steps += 1
    assert steps > 3
    assert export.finish().checksum == checksums_of(out).total == checksums_of(tmp_path).total


def test_numbers_that_a_form_has_not_are_refused_by_name_after_all_buckets(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with torch.no_grad():
        built.decoder.layers[0].self_attention.linear_qkv.weight[0, 0] = float("inf")
    for advances in (False, True):
        export = export_to_files(
            own_parts([built], hf), hf, out, weight_thread(), device=CPU, bucket_bytes=3000, form=FORMS["bfloat16"]
        )
        while advances and export.advance():
            pass
        with pytest.raises(ValueError, match=r"to engines: model.layers.0.self_attn.q_proj.weight .* at \[0, 0\]"):
            export.finish()


@pytest.mark.slow
def test_an_export_takes_two_buckets_and_twice_the_largest_tensor_or_a_rank_s_part_at_most(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.actors.trainer.weights.export_peaks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, memory in found.items():
        assert memory["written"] > 150
        if name.startswith("copy"):
            assert 0.9 * memory["own"] < memory["peak"] <= memory["own"] + 2 * COPY_BUCKET / MB, found
        else:
            assert memory["peak"] <= (2 * BUCKET + 2 * LARGEST) / MB, found
    assert found["stream 2"]["peak"] > LARGEST / 2 / MB  # it is seen at all
