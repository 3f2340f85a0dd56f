"""A recipe without model.dtype trains in that of its model; on the CPU if the model is no toy and the processor can."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.models import dtypes
from runtime.models.dtypes import stored_dtype
from runtime.node.checks import hub
from runtime.node.checks.context import CheckContext
from runtime.node.checks.files import check_paths
from runtime.settings.load import load_topology
from tests.support.tiny_engine import write_config

LAPTOP = Path(__file__).resolve().parents[3] / "topologies/laptop.toml"


def dtype_of(model: str | Path, *overrides: str, device: str = "cuda") -> str:
    changes = [f"model.hf_checkpoint={str(model)!r}", f"trainer.device={device!r}", *overrides]
    if device == "cuda":
        changes += ['trainer.gpus="local:0"', "nodes.local.gpus=1"]
    return load_topology(LAPTOP, changes).topology.model.dtype


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({"dtype": 7}, "float32"),  # refused where the model is read
    ],
)
def test_that_of_the_model(tmp_path: Path, stored: dict[str, object], expected: str) -> None:
    write_config(tmp_path, **stored)
    assert dtype_of(tmp_path) == expected
    assert dtype_of(tmp_path, device="cpu") == "float32"


def test_what_the_recipe_says_goes_first(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="bfloat16")
    assert dtype_of(tmp_path, 'model.dtype="float32"') == "float32"


def test_a_model_of_the_hub_is_known_once_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "cached", dtype="bfloat16")
    monkeypatch.setattr(hub, "cached", lambda _: tmp_path / "cached")
    changes = [
        'model.hf_checkpoint="someone/model"',
        'trainer.device="cuda"',
        'trainer.gpus="local:0"',
        "nodes.local.gpus=1",
    ]
    loaded = load_topology(LAPTOP, changes)
    assert loaded.topology.model.dtype == "float32"
    assert hub.with_cached(loaded, lambda _: None).topology.model.dtype == "bfloat16"


def test_a_run_without_its_trainer_has_the_dtype_of_the_whole(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="bfloat16")
    assert dtype_of(tmp_path, 'run.only="rollout"', f"run.dump_details={str(tmp_path / 'dump')!r}") == "bfloat16"


FILES = {  # by name, the dtype of each tensor with its number of weights
    "bfloat16": {"a": ("bfloat16", 64), "b": ("bfloat16", 8)},
    "float32": {"a": ("float32", 64)},
    "float16": {"a": ("float16", 64)},
    "the first and a few in another one": {"a": ("float32", 4), "b": ("bfloat16", 4096), "c": ("bfloat16", 64)},
    "most in float32": {"a": ("bfloat16", 4), "b": ("float32", 64)},
    "as many of each": {"a": ("bfloat16", 64), "b": ("float32", 64)},
    "float64": {"a": ("float64", 64)},
    "integers beside them": {"a": ("int64", 4096), "b": ("bfloat16", 4)},
}


@pytest.mark.parametrize(
    ("files", "expected", "says"),
    [
        ("bfloat16", "bfloat16", "as config.json names none, that of most weights; its files have 2 tensors in BF16"),
        ("float32", "float32", "its files have 1 tensor in F32"),
        ("float16", "bfloat16", "1 tensor in F16; those in F16 are rounded"),
        (
            "the first and a few in another one",
            "bfloat16",
            "2 tensors in BF16 and 1 tensor in F32; those in F32 are rounded",
        ),
        ("most in float32", "float32", "1 tensor in BF16 and 1 tensor in F32"),
        ("as many of each", "float32", "1 tensor in BF16 and 1 tensor in F32"),
        ("float64", "float32", "1 tensor in F64; those in F64 are rounded"),
        ("integers beside them", "bfloat16", "1 tensor in BF16"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_that_of_most_weights_if_the_config_names_none(
    tmp_path: Path, files: str, expected: str, says: str, sharded: bool
) -> None:
    write_config(tmp_path, dtype=None, torch_dtype=None)
    tensors = {name: torch.zeros(count, dtype=getattr(torch, dtype)) for name, (dtype, count) in FILES[files].items()}
    if sharded:
        for name, tensor in tensors.items():
            save_file({name: tensor}, tmp_path / f"of-{name}.safetensors")
        index = {"weight_map": {name: f"of-{name}.safetensors" for name in tensors}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    drawn = "model.random_init=false"
    assert dtype_of(tmp_path, drawn) == expected
    assert dtype_of(tmp_path, drawn, device="cpu") == "float32"
    found = stored_dtype(tmp_path, has_weights=True)
    assert found is not None
    assert found.note.endswith(says)


def test_the_config_goes_before_the_files_and_a_check_says_what_is_rounded(tmp_path: Path) -> None:
    write_config(tmp_path, dtype="bfloat16")
    save_file({"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    changes = [f"model.hf_checkpoint={str(tmp_path)!r}", "trainer.device='cuda'", "model.random_init=false"]
    loaded = load_topology(LAPTOP, [*changes, 'trainer.gpus="local:0"', "nodes.local.gpus=1"])
    assert loaded.topology.model.dtype == "bfloat16"
    context = CheckContext(loaded)
    context.run(check_paths)
    assert [note for note in context.notes if "model.dtype" in note] == [
        "model.dtype is unset: bfloat16, dtype in config.json; its files have 1 tensor in BF16 and 1 tensor in F32; "
        "those in F32 are rounded"
    ]


LARGE = {"vocab_size": 50_000, "hidden_size": 512, "head_dim": 128}


@pytest.mark.parametrize(
    ("flags", "changes", "expected", "says"),
    [
        ("fpu avx512_bf16 sse", {}, "bfloat16", "bfloat16, as in config.json; the processor has avx512_bf16"),
        ("fpu amx_bf16 sse", {}, "bfloat16", "bfloat16, as in config.json; the processor has amx_bf16"),
        ("fpu avx512f sse", {}, "float32", "float32, as the processor has no avx512_bf16 or amx_bf16"),
        (None, {}, "float32", "float32, as the processor has no avx512_bf16 or amx_bf16"),
        ("fpu avx512_bf16 sse", {"dtype": "float32"}, "float32", None),
        ("fpu avx512_bf16 sse", {"vocab_size": 64}, "float32", None),  # a toy
    ],
)
def test_the_cpu_computes_in_bfloat16_if_its_processor_can(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str | None,
    changes: dict[str, object],
    expected: str,
    says: str | None,
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    monkeypatch.setattr(dtypes, "CPU_INFO", cpu_info)
    if flags is not None:
        cpu_info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    write_config(tmp_path, **LARGE | {"dtype": "bfloat16"} | changes)
    model = [f"model.hf_checkpoint={str(tmp_path)!r}", "model.random_init=false"]
    loaded = load_topology(LAPTOP, model)
    assert loaded.topology.model.dtype == expected
    context = CheckContext(loaded)
    context.run(check_paths)
    wanted = [] if says is None else [f"model.dtype is unset: {says}"]
    assert [note for note in context.notes if "model.dtype" in note] == wanted
    assert load_topology(LAPTOP, model[:1]).topology.model.dtype == "float32"  # drawn weights
    assert load_topology(LAPTOP, [*model, 'model.dtype="bfloat16"']).topology.model.dtype == "bfloat16"


def test_drawn_weights_have_no_dtype_of_files(tmp_path: Path) -> None:
    write_config(tmp_path, dtype=None)
    save_file({"a": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path, has_weights=False) is None
