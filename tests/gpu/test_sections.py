"""What `just test-gpu` does on a GPU, tiny and on the CPU: its functions work, though they show nothing of a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.trainer.models.config import read_hf_config
from runtime.settings.devices import HIDDEN
from tests.gpu import __main__ as sections
from tests.gpu import single, speed
from tests.gpu.__main__ import SECTIONS, chosen, function_of
from tests.gpu.attention import attention, latent_attention
from tests.gpu.measured import Measured
from tests.gpu.model import operations, peak_of, work

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(2500)
def test_all_that_only_a_gpu_can_show(tmp_path: Path) -> None:
    done = command(tmp_path, {})
    assert done.returncode == 0, done.stdout + done.stderr


def command(tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path / "gpu.json")]
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=2400, check=False
    )


@pytest.mark.slow
def test_without_a_gpu_it_fails_and_says_so(tmp_path: Path) -> None:
    done = command(tmp_path, HIDDEN)
    assert (done.returncode, done.stderr) == (
        1,
        "no GPU: torch of this interpreter finds none, and nothing was tested\n",
    )
    assert not (tmp_path / "gpu.json").exists()


def test_results_become_a_dated_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(sections, "run_all", lambda names: {"ipc": {"numbers": {"s": 2}, "problems": []}})
    out, results = tmp_path / "gpu.json", tmp_path / "results"
    assert sections.main(["--out", str(out), "--results", str(results), "--section", "ipc"]) == 0
    [page] = results.iterdir()
    assert json.loads(out.read_text())["sections"]["ipc"]["numbers"] == {"s": 2}
    assert page.name.endswith("-gpu.md")
    assert "| numbers.s | 2 |" in page.read_text()


def test_every_section_has_its_function() -> None:
    assert all(callable(function_of(name)) for name in SECTIONS)


@pytest.mark.parametrize("compare", [attention, latent_attention])
def test_attention_of_packed_rows_is_that_of_sequences_one_by_one(compare: Callable[..., Measured]) -> None:
    torch.set_num_threads(1)
    found = compare("cpu", tiny=True)
    assert found.problems == []
    assert json.dumps(found.numbers)


@pytest.mark.nightly
def test_speed_recomputation_and_offload_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "STEPS", 2)
    monkeypatch.setattr(speed, "WIDTHS", (16,))
    torch.set_num_threads(1)
    found, again = speed.speed("cpu", tiny=True), speed.recompute("cpu", tiny=True)
    moved = speed.offload("cpu", tiny=True)
    assert (found.problems, again.problems, moved.problems) == ([], [], [])
    assert moved.numbers["bytes"] > 0
    assert moved.numbers["loss_apart"] == 0
    assert found.numbers["sides"]["ours"]["operations_per_s"] > 0
    assert {name: one["loss"] for name, one in again.numbers.items()}.keys() == {"none", "selective", "full"}
    assert json.dumps([found.numbers, again.numbers, moved.numbers])


@pytest.mark.nightly
@pytest.mark.parametrize("section", ["ipc", "update", "nccl", "fp8"])
def test_weights_reach_another_process_and_are_cast_alike(section: str) -> None:
    torch.set_num_threads(1)
    found = function_of(section)("cpu", tiny=True)
    assert found.problems == []
    assert json.dumps(found.numbers)


def test_without_sglang_its_section_is_left_out_and_asked_for_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(single, "PYTHON", sys.executable)
    assert not single.has_sglang()
    assert set(SECTIONS) - set(chosen()) == {"single-gpu"}
    assert capsys.readouterr().out.startswith("single-gpu: not run, ")
    (problem,) = single.single_gpu("cuda").problems
    assert problem.endswith("has no SGLang: PHYSARUM_SGLANG_PYTHON names an interpreter that has")


@pytest.mark.nightly
@pytest.mark.parametrize("section", ["single-gpu", "layouts", "laptop"])
def test_a_section_of_several_processes_answers(section: str) -> None:
    found = function_of(section)("cpu", tiny=True)
    assert found.problems == []
    assert json.dumps(found.numbers)


def test_operations_of_a_step_by_hand(tmp_path: Path) -> None:
    model = read_hf_config(Path(work(tmp_path, "cpu", tiny=True, steps=1).topology.model.hf_checkpoint))
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64  # query, key and value, output, three of the MLP
    weights = 2 * 2 * layer * 3  # 2 a weight, 2 layers, 3 tokens
    attention = 2 * (2 + 2) * 32 * (1 + 2 + 3)  # 2 layers; scores and values; pairs of positions
    head = 2 * 32 * 96 * 2  # 2 trained tokens
    assert operations(model, [3], 2) == 3 * (weights + attention + head)
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA H200") == 989e12
    assert peak_of("another") is None
