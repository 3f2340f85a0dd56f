"""Files that hold anything else than a model's weights are refused by the tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import check_weights
from runtime.models.safetensors import SINGLE_FILE
from tests.actors.trainer.hf import write_model, write_mtp_model
from tests.build.topology import MakeTopology

PROJECTION = "model.layers.1.self_attn.q_proj.weight"
State = dict[str, torch.Tensor]


def changed(directory: Path, change: Callable[[State], object], *, tied: bool = False) -> None:
    """Write a model's directory and change its tensors."""
    write_model(directory, tied=tied)
    state = load_file(directory / SINGLE_FILE)
    change(state)
    save_file(state, directory / SINGLE_FILE, metadata={"format": "pt"})


def add(name: str, *shape: int) -> Callable[[State], object]:
    return lambda state: state.update({name: torch.ones(shape)})


def cast(dtype: torch.dtype) -> Callable[[State], object]:
    return lambda state: state.update({PROJECTION: state[PROJECTION].to(dtype)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add("model.layers.0.self_attn.q_proj.bias", 32), r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        (add("model.layers.2.input_layernorm.weight", 16), r"no tensor model\.layers\.2\.input_layernorm\.weight"),
        (add("score.weight", 1, 16), r"no tensor score\.weight"),
        (cast(torch.int8), r"q_proj\.weight is I8, and config\.json has no quantization_config"),
        (cast(torch.float8_e4m3fn), r"q_proj\.weight is F8_E4M3, and config\.json has no quantization_config"),
        (lambda state: state.pop(PROJECTION), r"has no tensor model\.layers\.1\.self_attn\.q_proj\.weight"),
        (add(PROJECTION, 32, 8), r"q_proj\.weight is \[32, 8\], and \[32, 16\] in the model"),
    ],
)
def test_what_is_not_the_models_weights_is_refused(
    make_topology: MakeTopology, model_dir: Path, change: Callable[[State], object], words: str
) -> None:
    changed(model_dir, change)
    with pytest.raises(ValueError, match=words):
        Replica(make_topology(model={"random_init": False}), torch.device("cpu"))


def test_a_head_of_its_own_is_refused_where_the_config_ties_it(model_dir: Path) -> None:
    def untie(state: State) -> None:
        head = state["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        state["lm_head.weight"] = head

    changed(model_dir, untie, tied=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        check_weights(model_dir, read_hf_config(model_dir))


def test_a_copy_of_the_tied_head_and_rope_buffers_are_accepted(model_dir: Path) -> None:
    def copy(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    changed(model_dir, copy, tied=True)
    check_weights(model_dir, read_hf_config(model_dir))


def test_unused_further_layers_are_accepted_as_many_as_the_config_names(model_dir: Path) -> None:
    write_mtp_model(model_dir)
    check_weights(model_dir, read_hf_config(model_dir))
    check_weights(model_dir, read_hf_config(model_dir, 1))
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"the model of config\.json has no tensor model\.layers\.2\."):
        check_weights(model_dir, read_hf_config(model_dir))


def test_a_cut_file_is_refused(model_dir: Path) -> None:
    write_model(model_dir)
    file = model_dir / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter than its header says"):
        check_weights(model_dir, read_hf_config(model_dir))
