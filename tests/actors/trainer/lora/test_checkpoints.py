"""Checkpoints of a LoRA run have its adapters alone; what is exported is what peft computes from them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actors.trainer.checkpoints import saved_run
from actors.trainer.commands import TrainerRank
from actors.trainer.export import CannotExport, export_run
from actors.trainer.lora.peft_files import CONFIG, TENSORS
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.models.checksums import checksums_of
from runtime.models.safetensors import SINGLE_FILE
from runtime.settings.topology import encode_topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoint_tensors import tensors_of
from tests.support.checkpoints import save, save_checkpoint

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
MakeRun = Callable[..., TrainerRank]


@pytest.fixture
def make_run(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> MakeRun:
    """The trainer of a run on a model of transformers, in its run directory."""

    def make(*, dtype: str = "float32", **lora: Any) -> TrainerRank:
        if not (model_dir / SINGLE_FILE).exists():
            write_model(model_dir)
        model = {"hf_checkpoint": str(model_dir), "random_init": False, "dtype": dtype}
        topology = make_topology(model=model, trainer={"lora": LORA | lora})
        directory = tmp_path / "run"
        directory.mkdir(exist_ok=True)
        (directory / "topology.json").write_bytes(encode_topology(topology))
        return TrainerRank(topology, directory)

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_exactly(make_topology: MakeTopology, tmp_path: Path, dtype: str) -> None:
    topology = make_topology(model={"dtype": dtype}, trainer={"lora": LORA})
    replica = Replica(topology, CPU)
    train = TrainStep(topology, replica)
    for step in range(2):
        train(random_batch(step))
    path = save_checkpoint(replica, tmp_path, step=2, incarnation=1)
    expected = [train(random_batch(step)).metrics["train/loss"] for step in (2, 3)]
    weights = whole_weights(replica.complete_chunks(), replica.hf)
    resumed = Replica(topology, CPU)
    train_on = TrainStep(topology, resumed)
    assert load_checkpoint(resumed, path) == 2
    assert [train_on(random_batch(step)).metrics["train/loss"] for step in (2, 3)] == expected
    for name, weight in whole_weights(resumed.complete_chunks(), resumed.hf).items():
        assert torch.equal(weight, weights[name]), name


def test_a_checkpoint_has_the_adapters_alone_and_names_its_base(make_run: MakeRun, model_dir: Path) -> None:
    rank = make_run()
    rank.train(random_batch())
    path, _ = save(rank, step=1)
    assert all(".lora_" in name for name, tensor in tensors_of(path).items() if tensor.ndim > 1)
    saved = saved_run(path).lora
    assert saved is not None
    assert saved.base == checksums_of(model_dir).total


def test_the_exported_adapter_is_what_the_trainer_computes_with(
    make_run: MakeRun, model_dir: Path, tmp_path: Path
) -> None:
    rank = make_run(rslora=True)
    rank.train(random_batch())
    save(rank, step=1)
    probe = rank.publish(1, confirmed=0).probe
    assert probe is not None
    export_run(tmp_path / "run", tmp_path / "merged")
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {CONFIG, TENSORS}
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.tensor([probe.token_ids])
    with torch.no_grad():
        log_probs = model(tokens).logits.log_softmax(-1)[0, :-1]
    found = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
    assert found.tolist() == pytest.approx(list(probe.log_probs[1:]), abs=1e-5)
    whole = model.merge_and_unload().state_dict()
    for name, weight in load_file(tmp_path / "merged" / SINGLE_FILE).items():
        ulp = torch.nextafter(whole[name].abs(), torch.tensor(torch.inf)) - whole[name].abs()
        assert ((weight - whole[name]).abs() <= ulp).all(), name


def test_a_run_starts_from_the_adapter_of_another(
    make_run: MakeRun, make_topology: MakeTopology, tmp_path: Path
) -> None:
    rank = make_run()
    rank.train(random_batch())
    save(rank, step=1)
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    model = {"hf_checkpoint": str(tmp_path / "model"), "random_init": False}
    other = Replica(make_topology(model=model, trainer={"lora": LORA | {"load": str(tmp_path / "adapter")}}), CPU)
    own = rank._replica
    expected = whole_weights(own.complete_chunks(), own.hf)
    for name, weight in whole_weights(other.complete_chunks(), other.hf).items():
        assert torch.equal(weight, expected[name]), name


def test_a_bfloat16_run_is_exported_in_bfloat16(make_run: MakeRun, tmp_path: Path) -> None:
    rank = make_run(dtype="bfloat16")
    rank.train(random_batch())
    save(rank, step=1)
    export_run(tmp_path / "run", tmp_path / "merged")
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    weights = load_file(tmp_path / "merged" / SINGLE_FILE) | load_file(tmp_path / "adapter" / TENSORS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"rank": 2}, r"rank is 4 in the checkpoint, and 2 by trainer\.lora"),
    "another scale": ({"alpha": 4.0}, r"alpha is 8\.0 in the checkpoint, and 4\.0"),
    "other targets": ({"targets": ["q_proj"]}, r'targets is \["down_proj",.*\] in the checkpoint, and \["q_proj"\]'),
    "all weights": ({"rank": 0, "alpha": 32.0}, r"has LoRA adapters of rank 4 alone"),
}


@pytest.mark.parametrize(("changes", "told"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_other_adapters_is_refused(make_run: MakeRun, changes: dict, told: str) -> None:
    rank = make_run()
    save(rank, step=0)
    with pytest.raises(ValueError, match=told):
        make_run(**changes).resume()


def test_a_checkpoint_on_another_base_is_refused(make_run: MakeRun, model_dir: Path) -> None:
    save(make_run(), step=0)
    shutil.move(model_dir / SINGLE_FILE, model_dir / "before")
    weights = load_file(model_dir / "before")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, model_dir / SINGLE_FILE, metadata={"format": "pt"})
    (model_dir / "before").unlink()
    from actors.trainer.lora import saved

    saved._base_sum.cache_clear()  # another process would read the files
    with pytest.raises(ValueError, match=r"has adapters of another base model: its weights are [0-9a-f]{64} in"):
        make_run().resume()


def test_a_checkpoint_with_all_weights_is_no_start_for_adapters(make_run: MakeRun) -> None:
    save(make_run(rank=0, alpha=32.0), step=0)
    with pytest.raises(ValueError, match=r"has all weights, and trainer\.lora\.rank = 4 trains adapters"):
        make_run().resume()


def test_an_adapter_is_exported_of_a_checkpoint_with_one_alone(make_run: MakeRun, tmp_path: Path) -> None:
    rank = make_run(rank=0, alpha=32.0)
    save(rank, step=0)
    with pytest.raises(CannotExport, match=r"has no adapter: trainer\.lora\.rank is 0"):
        export_run(tmp_path / "run", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
    rank = make_run()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    rank.publish(1, confirmed=0)
    with pytest.raises(CannotExport, match="published weights are merged"):
        export_run(tmp_path / "run", tmp_path / "out", adapter=True)
