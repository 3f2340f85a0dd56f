"""A recipe without model.dtype trains in that of its model on a GPU, in float32 on the CPU."""

from pathlib import Path

import pytest

from runtime.node.checks import hub
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
