"""The oracle of engine checksums: tensors fused and sharded by hand, in any order, and the tiny engine."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.tiny_engine.model.forward import load
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import entry_of
from actors.trainer.weights.engine_sums import (
    ExpectedChecksums,
    Layout,
    SumsSink,
    expected_checksums,
    joined_sums,
    layout_of,
    made_of,
    place_of,
    why_not,
)
from actors.trainer.weights.gathering import buckets
from runtime.models.checksums import DIGITS, digits_of, engine_checksum
from runtime.models.config import read_model
from tests.actors.trainer.tiny import TINY, config_of
from tests.build.topology import topology_with
from tests.support.tiny_engine import write_config
from tests.support.tiny_models import LLAMA, QWEN2, QWEN3, QWEN3_MOE, write_model

TINY_ENGINE = Layout(is_padded=False)
LAYER = "model.layers.12."
ODD = {  # nothing that two ranks divide evenly
    "vocab_size": 70, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip


def drawn(model: HfConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(model).items()}


def model_of(directory: Path, config: dict[str, Any]) -> HfConfig:
    write_config(directory, **(TINY | {"architectures": None} | config))
    return read_hf_config(directory)


def hashed(*parts: Tensor) -> str:
    return hashlib.sha256(torch.cat(parts).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    rest = list(tensor.shape)
    rest[dim] = size - rest[dim]
    return torch.cat([tensor, torch.zeros(rest)], dim=dim)


def test_two_ranks_by_hand(tmp_path: Path) -> None:
    model = model_of(tmp_path, ODD | {"num_hidden_layers": 1})
    weights = drawn(model)
    found = expected_checksums([list(weights.items())], model, Layout(tp_size=2))
    layer = "model.layers.0."
    # Two key-value heads in the place of one, so eight query heads in the place of four: the second rank has zeros.
    query = padded(weights[f"{layer}self_attn.q_proj.weight"], 0, 48).chunk(2)
    key, value = (padded(weights[f"{layer}self_attn.{part}_proj.weight"], 0, 12).chunk(2) for part in "kv")
    gate, up = (padded(weights[f"{layer}mlp.{part}_proj.weight"], 0, 64).chunk(2) for part in ("gate", "up"))
    back = padded(weights[f"{layer}self_attn.o_proj.weight"], 1, 48).chunk(2, dim=1)
    down = padded(weights[f"{layer}mlp.down_proj.weight"], 1, 64).chunk(2, dim=1)
    embedding, head = (
        padded(weights[name], 0, 128).chunk(2) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    whole = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    for rank in (0, 1):
        assert found[rank] == {
            "model.embed_tokens.weight": hashed(embedding[rank]),
            "lm_head.weight": hashed(head[rank]),
            "model.norm.weight": hashed(weights["model.norm.weight"]),
            **{f"{layer}{name}.weight": hashed(weights[f"{layer}{name}.weight"]) for name in whole},
            f"{layer}self_attn.qkv_proj.weight": hashed(query[rank], key[rank], value[rank]),
            f"{layer}self_attn.o_proj.weight": hashed(back[rank]),
            f"{layer}mlp.gate_up_proj.weight": hashed(gate[rank], up[rank]),
            f"{layer}mlp.down_proj.weight": hashed(down[rank]),
        }


def test_experts_by_hand(tmp_path: Path) -> None:
    model = model_of(tmp_path, config_of("qwen3_moe"))
    weights = drawn(model)
    found = expected_checksums([list(weights.items())], model, Layout(tp_size=2, dtype=torch.bfloat16))
    experts = "model.layers.1.mlp.experts."
    for rank in (0, 1):
        rows = [
            padded(weights[f"{experts}{expert}.{part}_proj.weight"], 0, 64).chunk(2)[rank]
            for expert in range(4)
            for part in ("gate", "up")
        ]
        columns = [
            padded(weights[f"{experts}{expert}.down_proj.weight"], 1, 64).chunk(2, dim=1)[rank] for expert in range(4)
        ]
        assert found[rank][f"{experts}w13_weight"] == hashed(*(part.bfloat16() for part in rows))
        assert found[rank][f"{experts}w2_weight"] == hashed(*(part.bfloat16() for part in columns))
        assert found[rank]["model.layers.1.mlp.gate.weight"] == hashed(
            weights["model.layers.1.mlp.gate.weight"].bfloat16()
        )


@pytest.mark.parametrize("seed", range(5))
def test_tensors_may_come_in_any_order_and_change_afterwards(seed: int, tmp_path: Path) -> None:
    model = model_of(tmp_path, config_of("qwen3_moe"))
    weights = drawn(model)
    layout = Layout(tp_size=2)
    expected = expected_checksums([list(weights.items())], model, layout)
    shuffled = list(weights.items())
    random.Random(seed).shuffle(shuffled)
    taking = ExpectedChecksums(model, layout)
    for bucket in buckets(((entry_of(name, tensor), tensor.clone()) for name, tensor in shuffled), 5000):
        taking.add(bucket)
        for _, tensor in bucket:
            tensor.zero_()
    assert taking.checksums() == expected


def test_of_what_comes_in_turn_nothing_is_kept(tmp_path: Path) -> None:
    model = model_of(tmp_path, config_of("qwen3_moe"))
    taking = ExpectedChecksums(model, Layout())
    for name, tensor in drawn(model).items():
        taking.add([(name, tensor)])
        assert not any(fused._early for fused in taking._fused.values())


def test_what_is_missing_unknown_or_there_twice_is_named(tmp_path: Path) -> None:
    model = model_of(tmp_path, {})
    weights = drawn(model)
    name = "model.layers.1.self_attn.k_proj.weight"
    taking = ExpectedChecksums(model, Layout())
    taking.add([pair for pair in weights.items() if pair[0] != name])
    with pytest.raises(ValueError, match=rf"1 tensors have not come, the first is {name}"):
        taking.checksums()
    for early in (name.replace("k_proj", "v_proj"), name.replace("k_proj", "q_proj")):
        with pytest.raises(ValueError, match=f"{early} came twice"):
            taking.add([(early, weights[early])])
    with pytest.raises(ValueError, match=r"other\.weight is no tensor of this model"):
        taking.add([("other.weight", torch.zeros(1))])


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        (config_of("deepseek_v3"), Layout(), "model_type deepseek_v3"),
        (config_of("glm4_moe"), Layout(), "model_type glm4_moe"),
        (config_of("qwen3_moe", tie_word_embeddings=True), Layout(), "tie_word_embeddings"),
        (config_of("qwen3_moe", mlp_only_layers=[1]), Layout(), "layers without experts"),
        ({}, Layout(dtype=torch.float8_e4m3fn), "an engine in torch.float8_e4m3fn"),
        ({}, Layout(tp_size=2, is_padded=False), "a tiny engine over several ranks"),
    ],
)
def test_what_cannot_be_predicted_says_why(config: dict[str, Any], layout: Layout, reason: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, config)
    assert reason in (why_not(model, layout) or "")
    with pytest.raises(ValueError, match=reason):
        ExpectedChecksums(model, layout)


@pytest.mark.parametrize(
    "changes",
    [QWEN3, QWEN3 | ODD, QWEN2 | {"tie_word_embeddings": True}, LLAMA, QWEN3_MOE],
    ids=["qwen3", "odd sizes", "biases and a tied head", "llama", "experts"],
)
def test_the_tiny_engine_reports_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, **changes)
    weights = load_file(tmp_path / "model.safetensors")
    model = read_hf_config(tmp_path)
    if model.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    held = load(read_model(tmp_path).shape, tmp_path)
    assert expected_checksums([list(weights.items())], model, TINY_ENGINE) == [held.checksums()]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.embed_tokens.weight", ["model.embed_tokens.weight"]),
        (f"{LAYER}self_attn.qkv_proj.bias", [f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv"]),
        (f"{LAYER}self_attn.q_norm.weight", [f"{LAYER}self_attn.q_norm.weight"]),
        (f"{LAYER}self_attn.o_proj.weight", [f"{LAYER}self_attn.o_proj.weight"]),
        (f"{LAYER}mlp.gate_up_proj.weight", [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"]),
        (f"{LAYER}mlp.down_proj.weight", [f"{LAYER}mlp.down_proj.weight"]),
        (f"{LAYER}mlp.gate.weight", [f"{LAYER}mlp.gate.weight"]),
        (
            f"{LAYER}mlp.experts.w13_weight",
            [f"{LAYER}mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")],
        ),
        (f"{LAYER}mlp.experts.w2_weight", [f"{LAYER}mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]),
    ],
)
def test_what_is_joined_and_back(name: str, parts: list[str]) -> None:
    assert made_of(name, num_experts=2) == parts
    assert [place_of(part) for part in parts] == [(name, number) for number in range(len(parts))]


def test_the_sums_of_two_stages_join_to_those_of_the_model(tmp_path: Path) -> None:
    """Each stage sums up the tensors of which it has all parts, in buckets of any cut."""
    model = model_of(tmp_path, {"num_hidden_layers": 2})
    weights, layout = drawn(model), Layout(tp_size=2)
    stages = [{}, {}]
    for name, tensor in weights.items():
        stages[int(".1." in name or name.startswith(("model.norm", "lm_head")))][name] = tensor
    shares = []
    for stage in stages:
        sink = SumsSink(model, layout)
        for name, tensor in stage.items():
            sink.take([(name, tensor)])()
        shares.append(sink.close())
    found = joined_sums(layout, shares)
    expected = expected_checksums([list(weights.items())], model, layout)
    assert (found.tp_size, found.dtype, found.is_padded) == (2, "float32", True)
    assert found.checksum == engine_checksum(expected)
    assert found.tensors == digits_of(expected)
    assert len(found.tensors) == DIGITS * len(expected[0])


POLICY: dict[str, Any] = {"kind": "tiny"}


@pytest.mark.parametrize(
    ("policy", "amx", "device", "found"),
    [
        (POLICY, True, "cpu", Layout(is_padded=False)),
        (POLICY | {"weight_format": "bfloat16"}, False, "cpu", Layout(dtype=torch.bfloat16, is_padded=False)),
        (POLICY | {"verify": "never"}, False, "cpu", 'engines.policy.verify = "never"'),
        ({"kind": "sglang"}, False, "cpu", Layout()),
        ({"kind": "sglang", "num_processes": 2}, False, "cpu", Layout(tp_size=2)),
        ({"kind": "sglang"}, True, "cpu", "SGLang packs matrices on CPUs with AMX"),
        ({"kind": "sglang"}, False, "cuda", "SGLang hashes and pads tensors on GPUs in a way of its own"),
        ({"kind": "sglang", "weight_format": "fp8"}, False, "cpu", "engines store FP8 weights in forms of their own"),
    ],
)
def test_sums_are_computed_where_engines_can_be_predicted(
    policy: dict[str, Any],
    amx: bool,
    device: str,
    found: Layout | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.trainer.weights.engine_sums._has_amx", lambda: amx)
    model = model_of(tmp_path, {})
    assert layout_of(topology_with(engines={"policy": policy}), model, torch.device(device)) == found
