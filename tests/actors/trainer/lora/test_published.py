"""Adapters as weight versions: peft's files of what the trainer computes with, on a base that is written once."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from actors.trainer.commands import TrainerRank
from actors.trainer.lora.peft_files import CONFIG, TENSORS
from actors.trainer.weights.publish import Published
from runtime.models.file_sums import sum_of
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it


def trainer_of(make_topology: MakeTopology, model_dir: Path, directory: Path, **tables: Any) -> TrainerRank:
    write_model(model_dir)
    topology = make_topology(
        model={"hf_checkpoint": str(model_dir), "random_init": False},
        trainer={"lora": {"rank": 4, "alpha": 6.0, "rslora": True}},
        **({"engines": {"policy": {"kind": "tiny"}}} | tables),
    )
    return TrainerRank(topology, directory)


def log_probs(model: Any, published: Published) -> list[float]:
    """Log-probs of the probe's tokens."""
    assert published.probe is not None
    tokens = torch.tensor([published.probe.token_ids])
    with torch.no_grad():
        rows = model(tokens).logits.log_softmax(-1)[0, :-1]
    return rows.gather(-1, tokens[0, 1:, None])[:, 0].tolist()


def test_a_version_is_an_adapter_of_a_base_that_is_written_once(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    rank = trainer_of(make_topology, model_dir, tmp_path / "run")
    versions: list[Published] = []
    for number in (1, 2):
        rank.train(random_batch(number))
        versions.append(rank.publish(number, confirmed=1))
    original = load_file(model_dir / "model.safetensors")
    for published in versions:
        path, base = published.path, published.base
        assert path is not None
        assert base == versions[0].base
        assert base is not None
        assert {file.name: sum_of(file) for file in path.iterdir()} == published.files
        assert set(published.files) == {CONFIG, TENSORS}
        for name, weight in load_file(Path(base.path) / "model.safetensors").items():
            assert torch.equal(weight, original[name]), name  # the base is not merged
        model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base.path), path)
        assert published.probe is not None
        assert log_probs(model, published) == pytest.approx(list(published.probe.log_probs[1:]), abs=1e-5)
        assert not model.peft_config["default"].use_rslora  # SGLang reads no such key
    assert versions[0].checksum != versions[1].checksum
    assert versions[0].path != versions[1].path


def test_what_no_engine_loads_any_more_is_deleted(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> None:
    rank = trainer_of(make_topology, model_dir, tmp_path / "run")
    root = tmp_path / "run" / "weights" / "adapters"
    for number in range(1, 6):
        rank.publish(number, confirmed=max(0, number - 3))
    assert sorted(path.name for path in root.glob("v*")) == ["v000002", "v000003", "v000004", "v000005"]
    rank.publish(6, confirmed=5, whole=True)  # engines could not use the base
    assert sorted(path.name for path in root.glob("v*")) == ["v000005", "v000006"]
    assert sorted(path.name for path in (root / "base").glob("v*")) == ["v000001", "v000006"]


def test_versions_are_merged_where_engines_do_not_serve_adapters(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    engines = {"policy": {"kind": "tiny", "serve_adapters": False}}
    rank = trainer_of(make_topology, model_dir, tmp_path / "run", engines=engines)
    published = rank.publish(1, confirmed=0)
    assert published.base is None
    assert published.path is not None
    assert (published.path / "model.safetensors").is_file()
