"""An export for Megatron-LM is read by Megatron's stock GPTModel, and a run starts from it with the same bits.

Megatron-core's dist_checkpointing reads here what Megatron-LM would; Megatron-LM itself was not tried.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from actors.trainer.checkpoints import RELEASE, TRACKER
from actors.trainer.commands import TrainerRank
from actors.trainer.export import CannotExport, export_run
from actors.trainer.megatron.imports import dist_checkpointing, quiet
from actors.trainer.megatron.megatron_lm_export import problems, write_for_megatron_lm
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import file_source
from actors.trainer.models.sharding import load_weights
from runtime.settings.topology import encode_topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.megatron.test_megatron_lm import stock_model
from tests.actors.trainer.models.test_model_parity import built_of
from tests.actors.trainer.tiny import VOCAB, config_of, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

ARGUMENTS = {  # of Megatron-LM, by hand from the tiny model's config.json
    **{"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2},
    **{"kv_channels": 8, "group_query_attention": True, "max_position_embeddings": 64, "norm_epsilon": 1e-6},
    **{"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True},
    **{"swiglu": True, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
    **{"rotary_base": 10000.0, "rotary_percent": 1.0, "num_experts": None, "padded_vocab_size": VOCAB, "bf16": False},
    **{"no_save_optim": True, "no_save_rng": True, "iteration": 0, "tensor_model_parallel_size": 1},
}
OF_MLA = {  # norms of a dense layer and of one with experts, as TransformerEngine's layers of MLA have them
    *("0.input_layernorm", "0.mlp.linear_fc1.layer_norm", "1.input_layernorm", "1.pre_mlp_layernorm"),
    *(f"{layer}.self_attention.linear_{part}_up_proj.layer_norm" for layer in (0, 1) for part in ("q", "kv")),
}
LAYERS = "decoder.layers."
NORM = "decoder.layers.1.pre_mlp_layernorm.weight"  # of a layer with experts, as TransformerEngine's layers have it


@pytest.fixture
def run(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> Path:
    """The directory of a run with a checkpoint of one train step."""
    write_model(model_dir)
    topology = make_topology(model={"random_init": False})
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "topology.json").write_bytes(encode_topology(topology))
    engine = TrainerRank(topology, directory)
    engine.train(random_batch())
    save(engine, step=1, incarnation=1)
    return directory


def test_the_stock_model_of_megatron_has_the_weights_of_the_export(run: Path, model_dir: Path, tmp_path: Path) -> None:
    assert export_run(run, tmp_path / "lm", megatron_lm=True).description == "checkpoint of step 1"
    assert (tmp_path / "lm" / TRACKER).read_text() == RELEASE
    export_run(run, tmp_path / "hf")
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    model = stock_model(model_dir, expected)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wanted = {"model": model.sharded_state_dict()}
    path = str(tmp_path / "lm" / RELEASE)
    with quiet():
        model.load_state_dict(dist_checkpointing.load(wanted, path)["model"], strict=False)
    for name, parameter in model.named_parameters():
        rows = (
            min(len(parameter), VOCAB) if name.startswith(("embedding.", "output_")) else len(parameter)
        )  # not padding
        assert torch.equal(parameter[:rows], before[name][:rows]), name
    common = torch.load(tmp_path / "lm" / RELEASE / "common.pt", weights_only=False)
    assert {name: getattr(common["args"], name) for name in ARGUMENTS} == ARGUMENTS
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    values: dict[str, Any] = json.loads((run / "topology.json").read_bytes())
    (run / "topology.json").write_text(json.dumps(values | {"trainer": values["trainer"] | {"lora": {"rank": 2}}}))
    with pytest.raises(CannotExport, match="a LoRA run"):
        export_run(run, tmp_path / "of LoRA", megatron_lm=True)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_a_run_starts_from_an_export_with_the_same_bits(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path, kind: str
) -> None:
    write_model(model_dir, kind)
    hf = read_hf_config(model_dir)
    built = built_of(hf)
    load_weights(built, hf, file_source(model_dir))
    expected = {name: tensor.clone() for name, tensor in whole_weights([built], hf).items()}
    (tmp_path / "lm").mkdir()
    write_for_megatron_lm(built, hf, tmp_path / "lm")
    with quiet():
        names = dist_checkpointing.load_tensors_metadata(str(tmp_path / "lm" / RELEASE))
    assert (NORM in names) == (hf.experts is not None)
    if hf.mla is not None:
        norms = {re.sub(r"[._]weight$", "", name) for name in names if "norm" in name and name.startswith(LAYERS)}
        assert {name.removeprefix(LAYERS) for name in norms} == OF_MLA
    trainer = {"load": str(tmp_path / "lm"), "load_weights_only": True}
    rank = TrainerRank(make_topology(trainer=trainer), tmp_path / "run")  # with random weights of its own
    assert rank.resume() == 0
    found = whole_weights(rank._replica.complete_chunks(), rank._replica.hf)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


REFUSED: dict[str, tuple[str, ...]] = {
    "deepseek_v32": ("Mla.indexer",),
    "gpt_oss": ("Attention.output_bias", "Attention.has_sinks", "Attention.window", "Experts.clamped", "Rope.yarn"),
    "gemma3_text": ("Attention.window", "Norms.after_attention", "several rotary embeddings", "embedding_scale"),
    "qwen3_next": ("DeltaNet", "Attention.has_gate", "has_centred_norms"),
    "qwen3": (),
    "deepseek_v3": (),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_megatron_lm_s_model_does_not_have_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    found = {*problems(read_hf_config(tmp_path))}
    assert {*REFUSED[kind]} <= found
    assert bool(found) == bool(REFUSED[kind])


def test_a_model_without_such_a_form_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    hf = msgspec.structs.replace(read_hf_config(tmp_path), embedding_scale=2.0)
    with pytest.raises(ValueError, match=r"qwen3 has no form of Megatron-LM's GPT model: embedding_scale"):
        write_for_megatron_lm(None, hf, tmp_path)
    assert not (tmp_path / RELEASE).exists()
