"""LoRA trains as peft does on transformers: loss, gradients, five optimizer steps, and merged weights."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft
import pytest
import torch

from actors.trainer.lora.adapters import adapters_of, whole_adapters
from actors.trainer.lora.peft_files import in_files, write_adapter
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import state_of, whole_weights, write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it


def peft_model(model: Any, directory: Path, targets: Any = "all-linear", **settings: Any) -> Any:
    """A transformers model with an adapter of random A and B, which is written to a directory."""
    config = peft.LoraConfig(r=4, target_modules=targets, **settings)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model


def adapter_tensors(replica: Replica) -> dict[str, Any]:
    """The adapters' parameters by peft's names."""
    found = [each for chunk in replica.chunks for each in adapters_of(chunk).values()]
    return {name: parameter for adapter in found for _, name, parameter, _ in adapter.tensors()}


def of_peft(model: Any) -> dict[str, Any]:
    """The same of a model of peft."""
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "rank-stabilized": {"use_rslora": True, "lora_alpha": 6},
    "query and down projection": {"targets": ["q_proj", "down_proj"], "lora_alpha": 4},
}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_equals_peft(make_topology: MakeTopology, tmp_path: Path, kind: str, settings: dict) -> None:
    topology, model = started(make_topology, tmp_path, kind, **settings)
    replica = Replica(topology, CPU)
    step, reference = TrainStep(topology, replica), ReferenceTrainer(topology, model, apart=True)
    for number in range(5):
        batch = random_batch(number)
        metrics, expected = step(batch).metrics, reference.train(batch)[0]
        for name in expected:
            assert metrics[f"train/{name}"] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        theirs = of_peft(model)
        assert theirs.keys() == adapter_tensors(replica).keys()
        for name, parameter in adapter_tensors(replica).items():
            if number == 0:
                torch.testing.assert_close(parameter.main_grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-5)
    merged = model.merge_and_unload()
    state = state_of(merged)
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=1e-5)


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.slow
@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS[1:]], ids=["both stacks", "down projections"])
def test_experts_train_as_the_target_parameters_of_peft(
    make_topology: MakeTopology, tmp_path: Path, experts: tuple[str, ...]
) -> None:
    """A pair for each expert, with one adapter of attention beside them, from A and B of peft's file."""
    settings = {"target_parameters": list(experts), "lora_alpha": 4}
    topology, model = started(make_topology, tmp_path, "qwen3_moe", targets=["q_proj"], **settings)
    config = topology.trainer.lora
    replica = Replica(topology, CPU)
    step, reference = TrainStep(topology, replica), ReferenceTrainer(topology, model, apart=True)
    for number in range(5):
        batch = random_batch(number)
        metrics, expected = step(batch).metrics, reference.train(batch)[0]
        for name in expected:
            assert metrics[f"train/{name}"] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        own, theirs = adapter_tensors(replica), of_peft(model)
        gradients = {name: parameter.main_grad for name, parameter in own.items()}
        found = dict(in_files(own, config))
        assert found.keys() == theirs.keys()
        for name, gradient in in_files(gradients, config) if number == 0 else ():
            torch.testing.assert_close(gradient, theirs[name].grad, rtol=1e-4, atol=1e-6)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)
    written = tmp_path / "written"
    written.mkdir()
    write_adapter(whole_adapters(replica.chunks), written, model=replica.hf, config=config, base="base")
    loaded = peft.PeftModel.from_pretrained(write_model(tmp_path / "again", "qwen3_moe"), written)
    for name, tensor in of_peft(loaded).items():
        torch.testing.assert_close(tensor, found[name], rtol=0, atol=0)
    state = state_of(model.merge_and_unload())
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=1e-5)


def started(
    make_topology: MakeTopology,
    place: Path,
    kind: str,
    *,
    targets: Any = "all-linear",
    algorithm: Mapping[str, Any] = MappingProxyType({"num_steps_per_rollout": 1, "entropy_coef": 0.05}),
    **settings: Any,
) -> tuple[Topology, Any]:
    """A run that starts from an adapter of peft, and the model with it."""
    base, adapter = place / "hf", place / "adapter"
    model = peft_model(write_model(base, kind), adapter, targets, **{"lora_alpha": 8} | settings)
    lora = {
        "rank": 4,
        "alpha": settings.get("lora_alpha", 8),
        "rslora": settings.get("use_rslora", False),
        "targets": targets if isinstance(targets, str) else (*targets, *settings.get("target_parameters", ())),
        "load": str(adapter),
    }
    topology = make_topology(
        model={"hf_checkpoint": str(base), "random_init": False},
        algorithm=dict(algorithm),
        optimizer={"adam_eps": 1e-4},
        trainer={"lora": lora},
    )
    return topology, model
