"""Which pipeline layouts hold how many layers, as Megatron-core shares them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.layout import check_layout
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.tiny import TINY, config_of

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def layout_of(pipeline: int, virtual: int | None = None, **named: Any) -> MegatronConfig:
    return MegatronConfig(pipeline_model_parallel_size=pipeline, virtual_pipeline_model_parallel_size=virtual, **named)


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (4, layout_of(1)),
        (4, layout_of(2)),
        (4, layout_of(2, **{FIRST: 1})),
        (4, layout_of(2, **{FIRST: 1, LAST: 3})),
        (8, layout_of(4, 2)),
        (5, layout_of(3, **{LAST: 1})),
    ],
)
def test_layers_that_stages_can_share(layers: int, layout: MegatronConfig, tmp_path: Path) -> None:
    check_layout(model_of(layers, tmp_path), layout)


@pytest.mark.parametrize(
    ("layers", "layout", "reason"),
    [
        (1, layout_of(2), "1 layer cannot be split equally over 2 pipeline stages"),
        (7, layout_of(4, 2), "7 layers cannot be split equally over 4 pipeline stages of 2 virtual ones"),
        (4, layout_of(2, **{FIRST: 1, LAST: 2}), f"pipeline stages, after {FIRST}, {LAST}"),
        (4, layout_of(1, **{FIRST: 4}), f"{FIRST} = 4: needs several pipeline stages"),
        (8, layout_of(4, 2, **{FIRST: 1}), "a multiple of their virtual stages"),
    ],
)
def test_layers_that_stages_cannot_share(layers: int, layout: MegatronConfig, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        check_layout(model_of(layers, tmp_path), layout)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"expert_model_parallel_size": 3}, "the number of experts = 4 of the model is not divisible by 3"),
        ({"tensor_model_parallel_size": 2}, "experts with tensor parallelism need sequence_parallel = true"),
        (
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 5},
            "moe_intermediate_size = 24 of the model is not divisible by 5",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
            "does not sum the experts' gradients",
        ),
    ],
)
def test_ranks_that_cannot_share_experts(layout: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config_of("qwen3_moe")))
    with pytest.raises(ValueError, match=reason):
        check_layout(read_hf_config(tmp_path), MegatronConfig(**layout))


@pytest.mark.parametrize(
    ("changes", "key"), [({"q_lora_rank": 5}, "q_lora_rank"), ({"kv_lora_rank": 9}, "kv_lora_rank")]
)
def test_latents_that_ranks_cannot_share(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config_of("deepseek_v3", **changes)))
    with pytest.raises(ValueError, match=key):
        check_layout(read_hf_config(tmp_path), MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True))


def test_ranks_do_not_share_an_expert_that_has_biases(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config_of("gpt_oss")))
    layout = {"expert_model_parallel_size": 2, "sequence_parallel": True, "tensor_model_parallel_size": 2}
    with pytest.raises(
        ValueError, match="expert_tensor_parallel_size = 2: not implemented yet for experts with biases; supported: 1"
    ):
        check_layout(read_hf_config(tmp_path), MegatronConfig(**layout))
    check_layout(read_hf_config(tmp_path), MegatronConfig(expert_tensor_parallel_size=1, **layout))


def test_ranks_cannot_share_the_experts_of_a_model_without_any(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no experts to distribute"):
        check_layout(model_of(2, tmp_path), MegatronConfig(expert_model_parallel_size=2))


def test_stages_of_a_further_layer_want_an_output_weight_of_its_own(tmp_path: Path) -> None:
    config = config_of("glm4_moe", tie_word_embeddings=True, num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    layout = MegatronConfig(pipeline_model_parallel_size=2, mtp_num_layers=1)
    with pytest.raises(ValueError, match="the model's output weight must not be its embedding"):
        check_layout(read_hf_config(tmp_path, 1), layout)
    check_layout(read_hf_config(tmp_path), MegatronConfig(pipeline_model_parallel_size=2))


def model_of(layers: int, directory: Path) -> HfConfig:
    (directory / "config.json").write_bytes(msgspec.json.encode(TINY | {"num_hidden_layers": layers}))
    return read_hf_config(directory)
