"""Logits against transformers, for values of keys that a tiny configuration of a family does not have, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.megatron.build import build_chunks
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.layers.rows import packing
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.files import file_source, random_source
from actors.trainer.models.names import read_into
from actors.trainer.models.shapes import hf_shapes, num_weights
from actors.trainer.models.sharding import global_name, load_weights
from runtime.models.config import ModelError
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import gradients_of, whole_weights, write_model
from tests.actors.trainer.tiny import OF_KIND, SIZED, TINY, VOCAB, YARN, config_of
from tests.build.model import mapping_source
from tests.support.tiny_models import LLAMA3_ROPE


def built_of(hf: HfConfig) -> Any:
    with quiet():
        config = transformer_config(hf, MegatronConfig(), dtype=torch.float32)
        (built,) = build_chunks(hf, config)
    return built


def load(directory: Path):
    hf = read_hf_config(directory)
    built = built_of(hf)
    load_weights(built, hf, file_source(directory))
    return built, hf


def test_logits_with_the_rope_of_llama_3_equal_those_of_transformers(tmp_path: Path) -> None:
    rope = LLAMA3_ROPE["rope_parameters"] | {"original_max_position_embeddings": 32}
    reference = write_model(tmp_path, "llama", rope_parameters=rope)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        found = built(tokens, None, None)
    with torch.no_grad():
        torch.testing.assert_close(found, reference(tokens).logits, rtol=0, atol=1e-4)


LATENT: dict[str, dict[str, Any]] = {
    "queries from the hidden state": {"q_lora_rank": None},
    "an epsilon of its own": {"rms_norm_eps": 1e-2},
    "all experts in one group": {"n_group": 1},
    "stretched": {"rope_parameters": YARN},
    "stretched, and scaled as YaRN says": {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": None}},
}


@pytest.mark.parametrize("changes", LATENT.values(), ids=LATENT.keys())
def test_logits_with_latents_equal_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = write_model(tmp_path, "deepseek_v3", **changes)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 50), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        torch.testing.assert_close(built(tokens, None, None), reference(tokens).logits, rtol=0, atol=1e-5)


def test_experts_in_groups_equal_those_of_transformers(tmp_path: Path) -> None:
    reference = write_model(tmp_path, "glm4_moe", n_routed_experts=6, n_group=3, num_experts_per_tok=4, topk_group=2)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (3, 50), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        torch.testing.assert_close(built(tokens, None, None), reference(tokens).logits, rtol=0, atol=1e-5)


TYPES = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "last layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "by type": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES}),
    "all layers": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "with sinks": ("gpt_oss", {}),
}
WHOLE = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
WITHOUT: dict[str, dict[str, Any]] = {"gpt_oss": {"sliding_window": 64}}


def close(found: torch.Tensor, expected: torch.Tensor, largest: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)


def assert_as_each_alone(built: Any, hf: HfConfig, reference: Any, *, packed: bool) -> torch.Tensor:
    """Compare logits and gradients with those of transformers for each sample alone; return its logits."""
    generator, lengths = torch.Generator().manual_seed(0), [17, 40, 3, 9] if packed else [40, 40]
    samples = [torch.randint(0, VOCAB, (1, length), generator=generator) for length in lengths]
    row = packing(np.cumsum([0, *lengths]).astype(np.int32), torch.device("cpu")) if packed else None
    with quiet():
        found = built(torch.cat(samples, 1 if packed else 0), None, None, packed_seq_params=row).flatten(0, 1)
    expected = torch.cat([reference(sample).logits[0] for sample in samples])
    assert float(expected.detach().std()) >= 1
    along = torch.randn(expected.shape, generator=generator)
    for logits in (found, expected):
        (logits * along).sum().backward()
    close(found.detach(), expected.detach(), float(expected.detach().abs().max()))
    gradients = gradients_of(reference)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        own = torch.empty_like(parameter)
        read_into(own, global_name(name, built), hf, gradients.__getitem__)
        close(parameter.grad, own, largest)
    return expected.detach()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_transformers(tmp_path: Path, name: str, packed: bool) -> None:
    kind, keys = WINDOWS[name]
    found: list[torch.Tensor] = []
    for each in (keys, WITHOUT.get(kind, {})):
        reference = write_model(tmp_path, kind, noise=0.2, **each)
        found.append(assert_as_each_alone(*load(tmp_path), reference, packed=packed))
    assert float((found[0] - found[1]).abs().max()) > 1e-3


def test_sinks_and_clamps_change_what_is_compared(tmp_path: Path) -> None:
    tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    for keys, sink in (({}, None), ({"swiglu_limit": 1e6}, None), ({}, -1e6)):
        model = write_model(tmp_path, "gpt_oss", noise=0.2, **keys)
        with torch.no_grad():
            for layer in model.model.layers if sink is not None else ():
                layer.self_attn.sinks.fill_(sink)
            found.append(model(tokens).logits)
    assert all(float((other - found[0]).abs().max()) > 1e-3 for other in found[1:])


SWITCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "cap of logits": ("gemma4_text", {"final_logit_softcapping": None}),
    "least sum": ("ernie4_5_moe", {"moe_norm_min": 1e-12}),
    "window": ("gemma4_text", {"sliding_window": 64}),
    "share of planes": (
        "gemma4_text, dense",
        {"rope_parameters": SIZED["rope_parameters"] | {"full_attention": WHOLE}},
    ),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_value_of_a_tiny_configuration_changes_what_is_compared(name: str, tmp_path: Path) -> None:
    kind, keys = SWITCHED[name]
    tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = [write_model(tmp_path, kind, noise=0.2, **each)(tokens).logits for each in ({}, keys)]
    assert float((found[0] - found[1]).abs().max()) > 1e-3


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
    weights = {name: tensor.clone() for name, tensor in whole_weights([built], hf).items()}
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        load_weights(built, hf, mapping_source(weights))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        file_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: deepseek_v3, kimi_k2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"is_causal": False}, "is_causal false is not supported: transformers' Qwen3ForCausalLM reads it"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config with quant_method "gptq" is not'),
        (
            {"auto_map": {"AutoModel": "m.X"}, "architectures": ["Qwen3ForCausalLM"], "model_type": None},
            "auto_map .*m.X.* is not supported without a model_type: the model's own code may compute another model",
        ),
        (config_of("qwen3_moe", num_experts_per_tok=5), "num_experts_per_tok 5 is not supported"),
        (config_of("qwen3_moe", mlp_only_layers=[0, 1]), "no layer has experts"),
        (config_of("qwen3_moe", attention_bias=True), "attention_bias is not supported"),
        (config_of("glm4_moe", n_group=3), "n_group 3 with topk_group 1 does not fit 4 experts"),
        (config_of("glm4_moe", norm_topk_prob=False), "norm_topk_prob false is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' needs a sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types 'chunked_attention' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window 0 is not positive"),
        (
            config_of("qwen3_moe", layer_types=["full_attention", "sliding_attention"], use_sliding_window=True),
            "layer_types 'sliding_attention' is not supported",
        ),
        (config_of("deepseek_v3", rope_interleave=False), "rope_interleave false is not supported"),
        (config_of("deepseek_v3", num_key_value_heads=2), "num_key_value_heads 2 is not supported with multi-latent"),
        (config_of("deepseek_v3", head_dim=8), "head_dim 8 is not supported; supported: qk_rope_head_dim, 4"),
        (config_of("deepseek_v3", kv_lora_rank=0), "kv_lora_rank 0 is not positive"),
        (config_of("deepseek_v3", qk_rope_head_dim=3, head_dim=3), "qk_rope_head_dim 3 is not even"),
        (config_of("deepseek_v3", attention_bias=True), "attention_bias is not supported"),
        (config_of("deepseek_v3", scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
        (config_of("deepseek_v3", topk_method="greedy"), "topk_method 'greedy' is not supported"),
        (config_of("deepseek_v3", moe_layer_freq=2), "moe_layer_freq 2 is not supported"),
        (config_of("deepseek_v3", norm_topk_prob=False), "norm_topk_prob false is not supported"),
        (config_of("deepseek_v3", n_group=3), "n_group 3 with topk_group 1 does not fit 4 experts"),
        (config_of("deepseek_v3", num_experts_per_tok=3, n_routed_experts=8), "topk_group 1 is not supported with"),
        (config_of("deepseek_v3", rope_parameters=YARN | {"attention_factor": 2.0}), "attention_factor of rope_type"),
        (config_of("deepseek_v3", rope_parameters=YARN | {"mscale": None}), "is not supported without mscale"),
        (config_of("deepseek_v3", rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' lacks 'factor'"),
        (config_of("deepseek_v3", rope_parameters={"rope_type": "llama3"}), "rope_type 'llama3' is not supported"),
        (config_of("glm4_moe", sliding_window=8), "sliding_window 8 is not supported"),
        (config_of("gpt_oss", attention_bias=False), "attention_bias false is not supported; supported: true"),
        (config_of("ernie4_5_moe", use_bias=True), "not implemented yet: biases of all projections"),
        (config_of("ernie4_5_moe", moe_k=1), "moe_k 1 is not supported; supported: 2 to moe_num_experts, 4"),
        (config_of("ernie4_5_moe", moe_norm_min=0.0), "moe_norm_min 0.0 is not positive"),
        (config_of("ernie4_5_moe", moe_layer_interval=0), "moe_layer_interval 0 is not positive"),
        (config_of("ernie4_5_moe", moe_layer_end_index=0), "no layer has experts: a dense model needs another"),
        (config_of("gemma4_text", hidden_size_per_layer_input=4), "not implemented yet: embeddings of each layer"),
        (
            config_of("gemma4_text", hidden_size_per_layer_input=None),
            "hidden_size_per_layer_input 256 is not supported",
        ),
        (config_of("gemma4_text", num_kv_shared_layers=1), "not implemented yet: layers that share keys and values"),
        (config_of("gemma4_text", attention_bias=True), "not implemented yet: attention with biases"),
        (config_of("gemma4_text", use_bidirectional_attention="all"), "use_bidirectional_attention 'all' is not"),
        (config_of("gemma4_text", final_logit_softcapping=-1.0), "final_logit_softcapping -1.0 is not positive"),
        (config_of("gemma4_text", num_global_key_value_heads=3), "num_key_value_heads of layer 1 must divide"),
        (config_of("gemma4_text", global_head_dim=5), "head sizes of layer 1 must be positive, and head_dim even"),
        (config_of("gemma4_text", per_layer_config={"1": {"rank": 3}}), "per_layer_config has 'rank' of layer 1"),
        (config_of("gemma4_text", top_k_experts=5), "top_k_experts 5 is not supported; supported: 2 to num_experts, 4"),
        (config_of("gpt_oss", rope_parameters={}), "rope_parameters is missing, and so is rope_scaling"),
        (
            config_of("gpt_oss", rope_parameters=OF_KIND["gpt_oss"]["rope_parameters"] | {"truncate": None}),
            "truncate None of rope_type 'yarn' is not true or false",
        ),
    ],
)
def test_a_model_that_would_train_differently_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    config = {key: value for key, value in (TINY | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_hf_config(tmp_path)


def test_keys_of_deepseeks_own_configs_are_read(tmp_path: Path) -> None:
    """As moonshotai/Moonlight-16B-A3B has them: in transformers 4's words, and with those of its own code."""
    own = {
        "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
    }
    config = config_of("deepseek_v3", **own, q_lora_rank=None, n_group=1, scoring_func="sigmoid", rope_theta=5e4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": None, "head_dim": None}))
    read = read_hf_config(tmp_path)
    assert read.mla is not None
    assert read.experts is not None
    assert (read.mla.query_rank, read.experts.num_groups, read.mla.rope.theta, read.mla.head_dim) == (
        None,
        None,
        5e4,
        10,
    )


def test_further_layers_with_latents_are_not_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v3", num_nextn_predict_layers=1)))
    with pytest.raises(ValueError, match="mtp_num_layers = 1 is not implemented yet for a model with multi-latent"):
        read_hf_config(tmp_path, 1)


def test_a_rope_base_under_the_old_key_is_read(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path).attention.rope.theta == 5e5


KIMI_K2 = {  # config.json of moonshotai/Kimi-K2-Instruct, without quantization_config
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        **{"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


@pytest.mark.parametrize("architectures", [["DeepseekV3ForCausalLM"], None])
def test_kimi_k2_is_the_architecture_of_deepseek_v3(tmp_path: Path, architectures: list[str] | None) -> None:
    found: list[HfConfig] = []
    for kind in ("kimi_k2", "deepseek_v3"):
        (tmp_path / "config.json").write_text(
            json.dumps(KIMI_K2 | {"model_type": kind, "architectures": architectures})
        )
        found.append(read_hf_config(tmp_path))
    assert found[0] == found[1]
    assert found[0].model_type == "deepseek_v3"
    assert num_weights(found[0]) // 10**9 == 1026  # "1T parameters" on its card


@pytest.mark.parametrize("kind", ["kimi_k2", "deepseek_v32"])
def test_another_architecture_under_such_a_name_is_refused(tmp_path: Path, kind: str) -> None:
    name = "Qwen3MoeForCausalLM" if kind == "kimi_k2" else "DeepseekV3ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2 | {"model_type": kind, "architectures": [name]}))
    with pytest.raises(ModelError, match=f"model_type '{kind}' does not match architecture {name}"):
        read_hf_config(tmp_path)
