"""New adapters, which layers get one, what is refused of peft's files, the reference model, and memory."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

from actors.trainer.lora.adapters import new_adapters
from actors.trainer.lora.peft_files import CONFIG, PREFIX, TENSORS, adapter_problems, config_values
from actors.trainer.lora.targets import NoTarget, adapter_shapes, num_adapter_weights, targeted
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.memory import rank_memory
from actors.trainer.models.shapes import num_weights
from actors.trainer.step.train_step import TrainStep
from runtime.settings.tables.trainer import LoraConfig
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.tiny import config_of, random_batch
from tests.bench.bench_trainer import REAL
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
CONFIG_4 = LoraConfig(rank=4, alpha=8.0)
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it


def model_of(directory: Path, kind: str = "qwen3", **changes: Any) -> HfConfig:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(kind, **changes)))
    return read_hf_config(directory)


def test_new_adapters_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    every, one = (new_adapters(model, LoraConfig(rank=4, targets=names), 1) for names in ("all-linear", ("v_proj",)))
    name = "model.layers.1.self_attn.v_proj.lora_A.weight"
    assert torch.equal(every(name), one(name))
    assert not torch.equal(every(name), every(name.replace("layers.1", "layers.0")))
    assert not torch.equal(every(name), new_adapters(model, CONFIG_4, 2)(name))
    assert not every(name.replace("lora_A", "lora_B")).any()


def test_new_adapters_are_spread_as_those_of_peft(tmp_path: Path) -> None:
    """Kaiming's uniform distribution with a = sqrt(5): within 1 / sqrt(in)."""
    model = model_of(tmp_path, hidden_size=256, intermediate_size=64)
    drawn = new_adapters(model, LoraConfig(rank=64), 1)("model.layers.0.mlp.up_proj.lora_A.weight")
    linear = torch.nn.Linear(256, 64, bias=False)
    torch.manual_seed(1)
    theirs = peft.tuners.lora.Linear(linear, "default", peft.LoraConfig(r=64), r=64).lora_A["default"].weight.detach()
    assert drawn.abs().max() == pytest.approx(1 / 16, rel=1e-3)
    assert theirs.abs().max() == pytest.approx(1 / 16, rel=1e-3)
    assert drawn.std() == pytest.approx(float(theirs.std()), rel=0.02)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_all_linear_stands_for_the_layers_that_peft_chooses(tmp_path: Path, kind: str) -> None:
    """With experts, peft chooses those and routers too: there it gets our names, which it takes as they are."""
    model, hf = write_model(tmp_path, kind), read_hf_config(tmp_path)
    names = "all-linear" if hf.experts is None else config_values(hf, CONFIG_4)["target_modules"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))
    theirs = {
        name.removeprefix(PREFIX).replace(".default", ""): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    assert adapter_shapes(hf, CONFIG_4) == theirs


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "tied head": ("qwen3", {"tie_word_embeddings": True}, "lm_head", r"lm_head: embedding and lm_head are one tensor"),
    "tied embedding": ("llama", {"tie_word_embeddings": True}, "embed_tokens", "one tensor"),
    "untied head": ("qwen3", {}, "lm_head", "target lm_head is not implemented yet; allowed: .*q_proj"),
    "router": ("qwen3_moe", {}, "gate", "a router never has an adapter"),
    "routed experts": ("qwen3_moe", {}, "up_proj", "up_proj of a model with experts is not implemented yet"),
    "experts without a router": ("qwen3", {}, "mlp.experts.down_proj", "no such linear layer"),
    "stacks of inputs by outputs": ("gpt_oss", {}, "mlp.experts.down_proj", "no such linear layer"),
    "no layer": ("qwen3", {}, "qkv_proj", 'no such linear layer; allowed: "all-linear", or some of q_proj'),
}


@pytest.mark.parametrize(("kind", "changes", "target", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_a_target_without_an_adapter_is_refused(
    tmp_path: Path, kind: str, changes: dict, target: str, told: str
) -> None:
    model = model_of(tmp_path, kind, **changes)
    with pytest.raises(NoTarget, match=told):
        targeted(model, LoraConfig(rank=4, targets=("q_proj", target)))


def test_a_rank_above_a_side_of_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoTarget, match=r"rank = 17 is above 16, a side of model\.layers\.0\.self_attn\.q_proj"):
        targeted(model_of(tmp_path), LoraConfig(rank=17))


KEYS: dict[str, Any] = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "bias": "all",
    "lora_bias": True,
    "trainable_token_indices": [1],
    "layers_to_transform": [0],
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "peft_type": "LOHA",
}


def adapter(directory: Path, model: HfConfig, **changes: Any) -> Path:
    """An adapter as peft writes it, with some keys changed."""
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(directory)
    values = json.loads((directory / CONFIG).read_text()) | changes
    (directory / CONFIG).write_text(json.dumps(values))
    shapes = adapter_shapes(model, LoraConfig(rank=4, targets=("q_proj",)))
    save_file({f"{PREFIX}{name}": torch.zeros(shape) for name, shape in shapes.items()}, directory / TENSORS)
    return directory


def found_in(directory: Path, model: HfConfig, **settings: Any) -> list[str]:
    return list(
        adapter_problems(directory, model, LoraConfig(**{"rank": 4, "alpha": 8.0, "targets": ("q_proj",)} | settings))
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_peft_that_changes_the_computation_is_refused(tmp_path: Path, key: str) -> None:
    model = model_of(tmp_path / "model")
    assert found_in(adapter(tmp_path / "own", model), model) == []
    (told,) = found_in(adapter(tmp_path / "other", model, **{key: KEYS[key]}), model)
    assert f"{CONFIG}: {key} = " in told
    assert "is not implemented yet" in told


def test_target_parameters_that_are_no_experts_of_the_settings_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "qwen3_moe")
    directory = adapter(tmp_path / "own", model, target_parameters=["mlp.experts.down_proj"])
    (told,) = found_in(directory, model)
    assert "the adapter alone has 8 layers, such as model.layers.0.mlp.experts.0.down_proj" in told
    missing = found_in(directory, model, targets=("q_proj", "mlp.experts.down_proj"))
    assert len(missing) == 4  # A and B of a stack in each layer
    assert f"{TENSORS} has no tensor {PREFIX}model.layers.0.mlp.experts.lora_A.weight" in missing[0]


def test_an_adapter_that_does_not_fit_the_settings_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    directory = adapter(tmp_path / "own", model)
    assert "lora_alpha is 8, and 16 by trainer.lora" in found_in(directory, model, alpha=16.0)[0]
    assert "use_rslora is False, and True" in found_in(directory, model, rslora=True)[0]
    assert "r is 4, and 2" in found_in(directory, model, rank=2)[0]
    told = found_in(directory, model, targets=("q_proj", "k_proj"))
    assert "trainer.lora.targets alone has 2 layers, such as model.layers.0.self_attn.k_proj" in told[0]
    assert f"has no tensor {PREFIX}model.layers.0.self_attn.k_proj.lora_A.weight" in told[1]
    (directory / TENSORS).unlink()
    assert TENSORS in found_in(directory, model)[0]
    (directory / CONFIG).write_text("[")
    assert CONFIG in found_in(directory, model)[0]


def test_what_is_written_is_read_by_peft(tmp_path: Path) -> None:
    values = config_values(model_of(tmp_path), LoraConfig(rank=4, alpha=6.0, rslora=True), "base")
    (tmp_path / CONFIG).write_text(json.dumps(values))
    read = peft.PeftConfig.from_pretrained(tmp_path)
    assert isinstance(read, peft.LoraConfig)
    assert (read.r, read.lora_alpha, read.use_rslora, read.base_model_name_or_path) == (4, 6, True, "base")


def test_the_reference_is_the_model_without_its_adapters(make_topology: MakeTopology, tmp_path: Path) -> None:
    """As with a second model; what the trainer keeps of the reference are adapters."""
    directory = tmp_path / "hf"
    model, reference = write_model(directory), write_model(tmp_path / "same")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    topology = make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        algorithm={"kl": {"type": "k3", "loss_coef": 0.2}},
        optimizer={"adam_eps": 1e-4},
        trainer={"lora": {"rank": 4, "alpha": 8.0}},
    )
    replica = Replica(topology, CPU)
    drawn = new_adapters(replica.hf, topology.trainer.lora, topology.run.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(drawn(name.removeprefix(PREFIX).replace(".default", "")))
    step, loop = TrainStep(topology, replica), ReferenceTrainer(topology, model, reference_model=reference, apart=True)
    for number in range(3):
        metrics, expected = step(random_batch(number)).metrics, loop.train(random_batch(number))
        assert metrics["train/kl_loss"] == pytest.approx(sum(one["kl_loss"] for one in expected) / 2, abs=1e-5)
    assert metrics["train/kl_loss"] > 1e-4
    kept = sum(tensor.numel() for tensor in replica.weights_copy())
    assert kept == num_adapter_weights(replica.hf, topology.trainer.lora)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_states_of_a_rank_are_those_estimated(make_topology: MakeTopology, dtype: str, rank: int) -> None:
    """Weights, gradients, main parameters and moments in bytes."""
    topology = make_topology(model={"dtype": dtype}, trainer={"lora": {"rank": rank}})
    replica = Replica(topology, CPU)
    TrainStep(topology, replica)(random_batch())
    buffers = sum(buffer.grad_data.nbytes for ddp in replica._ddp for buffer in ddp.buffers)
    inner = replica.optimizer.optimizer
    weights = {id(each): each for chunk in replica.chunks for each in chunk.parameters()}
    main = [each for group in inner.param_groups for each in group["params"] if id(each) not in weights]
    moments = [state[name] for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
    found = buffers + sum(each.nbytes for each in (*weights.values(), *main, *moments))
    assert found == rank_memory(topology, replica.hf).states


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.29), ("bfloat16", 0.15)])
def test_adapters_need_less_memory_than_all_weights(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, share: float
) -> None:
    """SmolLM2-135M with rank 8: of 16 or 18 bytes a weight remain 4 or 2, and the adapters' own."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text(json.dumps(REAL))
    model = read_hf_config(tmp_path / "real")
    states = [
        rank_memory(make_topology(model={"dtype": dtype}, trainer={"lora": {"rank": rank}}), model).states
        for rank in (8, 0)
    ]
    assert num_adapter_weights(model, LoraConfig(rank=8)) / num_weights(model) < 0.02
    assert states[0] / states[1] < share
