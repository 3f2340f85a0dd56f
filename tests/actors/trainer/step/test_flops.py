"""Operations of training, reckoned by hand."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.step.metrics import peak_flops, train_flops
from runtime.models.blocks import Experts, Layer
from tests.actors.trainer.tiny import config_of


@pytest.fixture
def tiny(model_dir: Path) -> HfConfig:
    return read_hf_config(model_dir)


def test_operations_of_a_dense_model_by_hand(tiny: HfConfig) -> None:
    # hidden 16, inner 32, 4 heads of 8, 2 key-value heads, 2 layers, vocabulary 32
    attention = 16 * 32 + 2 * 16 * 16 + 32 * 16  # queries; keys and values; output
    weights = 2 * (attention + 3 * 16 * 32) + 32 * 16
    pairs = (10 * 10 + 6 * 6) / 2
    forward = 2 * weights * 16 + 2 * (2 * 2 * 4 * 8 * pairs)  # scores and values, by layer
    assert train_flops(tiny, [10, 6]) == 3 * forward


def test_of_experts_those_that_a_token_is_routed_to_count(tiny: HfConfig) -> None:
    experts = Experts(
        num_experts=8, num_experts_per_tok=2, size=24, score="softmax", has_bias=False, norm_topk_prob=True
    )
    layers = (Layer(tiny.attention, experts), *tiny.layers[1:])
    difference = train_flops(replace(tiny, layers=layers), [1]) - train_flops(tiny, [1])
    assert difference == 3 * 2 * (2 * 3 * 16 * 24 + 8 * 16 - 3 * 16 * 32)  # two experts and the router, for one MLP


def test_with_latents_values_have_a_size_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v3")))
    model = read_hf_config(tmp_path)
    # 4 heads: queries and keys 6 + 4, values 7; latents of 12 and 10; 2 of 4 experts of 24, one for all, a dense layer
    attention = 16 * 12 + 12 * 40 + 16 * (10 + 4) + 10 * 4 * (6 + 7) + 4 * 7 * 16
    weights = 2 * attention + 3 * 16 * 32 + 3 * 3 * 16 * 24 + 4 * 16 + 32 * 16
    assert train_flops(model, [10]) == 3 * (2 * weights * 10 + 2 * 2 * 4 * (10 + 7) * 50)


def test_what_a_gpu_can_do_is_known_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("a GPU of next year") is None
