"""Logits and weights against transformers, for every kind of model that the trainer takes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.trainer.batches.batch import make_micro_batch
from actors.trainer.megatron.build import build_chunks
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.layers.attention import packing
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.cuts import load_weights
from actors.trainer.models.files import file_source
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.sources import mapping_source, random_source
from runtime.settings.topology import MegatronConfig
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import TINY, VOCAB, config_of, random_batch
from tests.support.tiny_models import LLAMA3_ROPE

KINDS = [(kind, tied) for kind in ("qwen3", "qwen2", "llama", "qwen3_moe") for tied in (False, True)]
KINDS += [("glm4_moe", False)]


def load(directory: Path):
    hf = read_hf_config(directory)
    with quiet():
        config = transformer_config(hf, MegatronConfig(), dtype=torch.float32, device=torch.device("cpu"))
        (built,) = build_chunks(hf, config)
    load_weights(built, hf, file_source(directory))
    return built, hf


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_logits_equal_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    reference = write_model(tmp_path, kind, tied=tied)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        torch.testing.assert_close(built(tokens, None, None), reference(tokens).logits, rtol=0, atol=1e-4)


def test_logits_with_the_rope_of_llama_3_equal_those_of_transformers(tmp_path: Path) -> None:
    rope = LLAMA3_ROPE["rope_parameters"] | {"original_max_position_embeddings": 32}
    reference = write_model(tmp_path, "llama", rope_parameters=rope)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        found = built(tokens, None, None)
    with torch.no_grad():
        torch.testing.assert_close(found, reference(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_weights_come_back_bit_for_bit(tmp_path: Path, kind: str, tied: bool) -> None:
    write_model(tmp_path, kind, tied=tied)
    reference = load_file(tmp_path / "model.safetensors")
    built, hf = load(tmp_path)
    exported = whole_weights([built], hf)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == hf_shapes(hf)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in exported.items())
    assert set(reference) == set(exported)


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_sequences_do_not_see_each_other(tmp_path: Path, multiple: int) -> None:
    write_model(tmp_path)
    built, _ = load(tmp_path)
    batch, samples = random_batch(), torch.arange(7).numpy()
    padded = make_micro_batch(batch, samples, packed=False)
    packed = make_micro_batch(batch, samples, packed=True, multiple=multiple)
    layout = packing(packed.bounds, torch.device("cpu"))
    with quiet(), torch.no_grad():
        of_padded = built(torch.from_numpy(padded.tokens), None, None).flatten(0, 1)[padded.rows_M]
        of_packed = built(torch.from_numpy(packed.tokens), None, None, packed_seq_params=layout)[0][packed.rows_M]
    order = [padded.columns_M.argsort(), packed.columns_M.argsort()]
    torch.testing.assert_close(of_padded[order[0]], of_packed[order[1]], rtol=0, atol=1e-5)


def test_random_weights_depend_on_the_seed_and_the_name_only(tmp_path: Path) -> None:
    write_model(tmp_path)
    hf = read_hf_config(tmp_path)
    drawn, again, other = random_source(hf, 1), random_source(hf, 1), random_source(hf, 2)
    names = list(hf_shapes(hf))
    first = {name: drawn(name) for name in names}
    assert all(torch.equal(again(name), first[name]) for name in reversed(names))
    assert not torch.equal(other(names[0]), first[names[0]])
    assert first[names[0]].std().item() == pytest.approx(hf.initializer_range, rel=0.1)
    assert all((first[name] == 1).all() for name in names if "norm" in name)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    weights = whole_weights([built], hf) | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        load_weights(built, hf, mapping_source(weights))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        file_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: qwen3, qwen2, llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"logits_scaling": 8.0}, "logits_scaling is not understood"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not understood"),
        ({"num_experts": 4}, "num_experts is not understood"),
        (config_of("qwen3_moe", n_group=2), "n_group is not understood"),
        (config_of("qwen3_moe", num_experts_per_tok=5), "num_experts_per_tok 5 is not supported"),
        (config_of("qwen3_moe", mlp_only_layers=[0, 1]), "none of its layers has experts"),
        (config_of("qwen3_moe", attention_bias=True), "attention_bias is not supported"),
        (config_of("glm4_moe", n_group=2), "n_group 2 is not supported; supported: 1"),
        (config_of("glm4_moe", norm_topk_prob=False), "norm_topk_prob false is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
    ],
)
def test_a_model_that_would_train_differently_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    config = {key: value for key, value in (TINY | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_hf_config(tmp_path)


def test_a_rope_base_under_the_old_key_is_read(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path).rope.theta == 5e5
