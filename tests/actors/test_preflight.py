"""What a start is refused for that settings show only together with the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from actors.preflight import check_fp8, preflight
from actors.trainer.models.config import read_hf_config
from runtime.node.checks.context import CheckContext
from runtime.settings.load import load_topology
from tests.actors.trainer.hf import write_model
from tests.gpu.model import CONFIG
from tests.runtime.settings.shipped import LAPTOP
from tests.support.checks import problems_of

TOPOLOGY = Path(__file__).parents[2] / "topologies" / "colocate-8gpu.toml"
FP8 = "engines.policy.weight_format=fp8"


@pytest.mark.parametrize(
    ("changes", "settings", "refused"),
    [
        ({}, (FP8,), ""),
        ({}, (FP8, "engines.policy.num_gpus_per_engine=8"), ""),
        ({"intermediate_size": 1536}, ("engines.policy.num_gpus_per_engine=8",), ""),
        (
            {"intermediate_size": 1536},
            (FP8, "engines.policy.num_gpus_per_engine=8"),
            "intermediate_size = 1536 of the model, 192 on each of 8 ranks: SGLang reads FP8 in multiples of 128 there",
        ),
        (
            {"num_key_value_heads": 1, "head_dim": 64},
            (FP8,),
            "num_key_value_heads x head_dim = 64 of the model: SGLang reads FP8 in multiples of 128 there",
        ),
    ],
)
def test_a_model_that_sglang_does_not_read_in_fp8_is_refused_by_its_size(
    changes: dict[str, Any], settings: tuple[str, ...], refused: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    found = problems_of(load_topology(TOPOLOGY, (*settings, f"model.hf_checkpoint={tmp_path}")), check_fp8)
    assert [(problem.key, problem.message) for problem in found] == (
        [("engines.policy.weight_format", refused)] if refused else []
    )


def critic_problems(tmp_path: Path, *overrides: str, critic: dict[str, Any] | None = None) -> dict[str, str]:
    """What a start of the laptop topology with PPO is refused for, by key."""
    settings = ["algorithm.estimator.type=ppo", f"run.dir={tmp_path}", *overrides]
    if critic is not None:
        write_model(tmp_path / "critic", **critic)
        settings.append(f"critic.hf_checkpoint={tmp_path / 'critic'}")
    return {
        problem.key: problem.message for problem in preflight(CheckContext(load_topology(LAPTOP, settings))).problems
    }


def test_a_critic_may_be_of_another_size_but_reads_the_tokens_of_the_actor(tmp_path: Path) -> None:
    vocabulary = read_hf_config(LAPTOP.parent / "demo/models/reverse-digits").vocab_size
    assert critic_problems(tmp_path) == {}
    assert critic_problems(tmp_path, critic={"vocab_size": vocabulary, "intermediate_size": 48}) == {}
    found = critic_problems(tmp_path, critic={"vocab_size": vocabulary + 1})
    message = f"reads a vocabulary of {vocabulary + 1} tokens, and the actor's has {vocabulary}"
    assert found == {"critic.hf_checkpoint": message}


def test_a_critic_that_the_layout_does_not_fit_is_refused(tmp_path: Path) -> None:
    vocabulary = read_hf_config(LAPTOP.parent / "demo/models/reverse-digits").vocab_size
    layout = ("trainer.num_processes=2", "trainer.megatron.tensor_model_parallel_size=2")
    found = critic_problems(tmp_path, *layout, critic={"vocab_size": vocabulary, "num_key_value_heads": 1})
    assert found.keys() == {"critic.hf_checkpoint"}
    assert found["critic.hf_checkpoint"].startswith("the critic has the layout of trainer.megatron: ")


def test_files_of_a_critic_without_a_tensor_are_refused(tmp_path: Path) -> None:
    vocabulary = read_hf_config(LAPTOP.parent / "demo/models/reverse-digits").vocab_size
    write_model(tmp_path / "critic", vocab_size=vocabulary)
    stored = load_file(tmp_path / "critic" / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "critic" / "model.safetensors", metadata={"format": "pt"})
    found = critic_problems(tmp_path, f"critic.hf_checkpoint={tmp_path / 'critic'}")
    assert "has no tensor model.norm.weight" in found["critic.hf_checkpoint"]
